"""``python -m rescheduler`` is the command ``headway``."""

import sys

from rescheduler.commands.command_line import main

if __name__ == "__main__":
    sys.exit(main())
