"""Load tests with locust: each module here is a scenario, `locust -f loadtests/steady.py`; kit/ is what they share."""
