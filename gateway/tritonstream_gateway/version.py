"""The gateway's version: that of the distribution it came with."""

import importlib.metadata

try:
    VERSION = importlib.metadata.version("tritonstream")
except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0"
