"""`tepal.training.data` under the name by which apps import it."""

from tepal.training.data import *  # noqa: F403
from tepal.training.data import __all__ as __all__
