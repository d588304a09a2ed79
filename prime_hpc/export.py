"""Short for `python -m prime_hpc.commands.export`."""

import sys

from prime_hpc.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
