"""Import torchvision where its compiled operators do not load.

A torchvision wheel built for CUDA fails at import beside a CPU-only torch (`operator torchvision::nms does not
exist`), and takes transformers' models with it. The models tested here need none of these operators, so declaring
their signatures is enough to test the real ones.
"""

from __future__ import annotations

import importlib
import re
import sys

from torch import library

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared = library.Library("torchvision", "FRAGMENT")  # kept alive: declarations go with their Library


def import_torchvision() -> bool:
    """Make `import torchvision` work; False when it is not installed. Errors it does not know are passed on."""
    for _ in range(len(SCHEMAS) + 1):
        try:
            importlib.import_module("torchvision")
            return True
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise
            return False
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None or missing[1] not in SCHEMAS:
                raise
            _declared.define(SCHEMAS.pop(missing[1]))
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]  # a half-imported package would be found again
    raise AssertionError("unreachable: every round declares one operator, returns or raises")
