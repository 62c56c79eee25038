"""A model of matrices of 8 MB, as a transformer has them, up to a given size."""

import numpy as np

SIDE = 1448  # 8.4 MB in float32


def shapes(megabytes: float) -> dict[str, tuple[int, int]]:
    size = int(megabytes * 1e6) // 4
    whole, rest = divmod(size, SIDE * SIDE)
    return {f"layer-{k}": (SIDE, SIDE) for k in range(whole)} | {"rest": (max(rest // SIDE, 1), SIDE)}


def model(megabytes: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.random(shape, np.float32) for name, shape in shapes(megabytes).items()}
