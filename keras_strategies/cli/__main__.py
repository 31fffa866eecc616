"""The program `python -m keras_strategies.cli`, if the tool is not on PATH."""

import sys

from keras_strategies.cli.main import main

sys.exit(main())
