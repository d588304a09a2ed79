"""Short for `python -m prime_hpc.commands.sweep`."""

import sys

from prime_hpc.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main())
