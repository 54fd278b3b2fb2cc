"""`python -m tritonstream`: the same as the `tritonstream` command."""

from tritonstream.cli import app

if __name__ == "__main__":
    app()
