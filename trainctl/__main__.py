"""`python -m trainctl` is `trainctl`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, put there by `python -m`: its modules are not ours
    from trainctl.cli.main import entry_point

    entry_point()
