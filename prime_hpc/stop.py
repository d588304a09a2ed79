"""Short for `python -m prime_hpc.commands.stop`."""

import sys

from prime_hpc.commands.stop import main

if __name__ == "__main__":
    sys.exit(main())
