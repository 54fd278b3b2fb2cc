"""An hour of a load that the server carries easily, with its memory watched: --watch-pid, --slo 'memory_growth<5%'."""

import random

from loadtests.kit import settings
from loadtests.kit.prompts import Mixed
from loadtests.kit.users import OpenUser

settings.defaults(num_users=20, spawn_rate=20, run_time="1h")


class Arrivals(OpenUser):
    """Short and long ones, for memory is lost at the edges."""

    def source(self, dice: random.Random) -> Mixed:
        """Mostly short, some long."""
        return Mixed(dice, [(0.9, 64, 128), (0.1, 512, 512)])
