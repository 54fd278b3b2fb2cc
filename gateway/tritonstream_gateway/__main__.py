"""`python -m tritonstream_gateway`: the same as the `tritonstream-gateway` command."""

from tritonstream_gateway.cli import app

if __name__ == "__main__":
    app()
