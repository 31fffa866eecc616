"""`python -m keras_strategies.cli`, where the command is not on the PATH."""

import sys

from keras_strategies.cli.main import main

sys.exit(main())
