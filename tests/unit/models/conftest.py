import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests

from torchvision_without_operators import import_torchvision

import_torchvision()  # before transformers, whose models import it when it is installed
