"""The command `npurt`, also as `python -m npurt`."""

import sys

from npurt.signals import Interrupted, Signals


def main() -> int:
    """Run the command line and return its exit code."""
    signals = Signals()
    signals.install()  # first: the import takes a tenth of a second
    try:
        from npurt.cli import main as run

        signals.check()
        code = run()
        signals.finish()
    except Interrupted:
        return int(signals.exit_code)
    return code


if __name__ == "__main__":
    sys.exit(main())
