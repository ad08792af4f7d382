"""`python -m trainctl` is `trainctl`."""

from trainctl.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
