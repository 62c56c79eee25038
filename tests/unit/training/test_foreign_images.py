"""Images of no class: their shape, range, and what was done to the images that they are made from."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tepal.training.data import normalise
from tepal.training.foreign_images import LETTERS, MOST, SETS, foreign_images

SHAPES = [(30, 1, 8, 8), (250, 1, 28, 28), (12, 3, 5, 7), (4, 3, 100, 64), (3, 2, 1, 1)]


def images(shape, seed=0):
    return np.random.default_rng(seed).random(shape, np.float32)


def digits():
    return (load_digits().images[:, None] / 16).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_set_has_the_images_shape_and_range(shape):
    of = images(shape)
    sets = foreign_images(of, seed=1)
    assert tuple(sets) == SETS
    for name, each in sets.items():
        assert each.shape == (MOST if name == "letters" else min(shape[0], MOST), *shape[1:]), name
        assert each.dtype == np.float32 and of.min() <= each.min() and each.max() <= of.max(), name


def test_the_sets_depend_only_on_the_images_and_the_seed():
    of = images((20, 1, 8, 8))
    before = of.copy()
    first, again, other = (foreign_images(of, seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(of, before)
    for name in SETS:
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name]) or name == "covered"


@pytest.mark.parametrize("by", ["0.3/0.4", "0.1,0.5,0.9/0.2,1,3"])
def test_to_normalise_before_or_after_is_the_same(by):
    of = images((24, 3, 9, 8))
    before = foreign_images(normalise(of.copy(), by), 3)
    for name, after in foreign_images(of, 3).items():
        np.testing.assert_allclose(before[name], normalise(after, by), atol=1e-5)


def test_letters_on_digits_are_white_on_black_and_differ():
    letters = foreign_images(digits(), 42)["letters"]
    assert letters.min() == 0 and letters.max() > 0.9
    assert (letters.max(axis=(1, 2, 3)) > 0.3).all(), "each shows something"
    assert len({each.tobytes() for each in letters}) > 0.95 * MOST
    # Ink covers less than half of an image, as in digits, so that the background is what it was.
    assert 0.05 < letters.mean() < digits().mean() + 0.1 and np.median(letters) == 0
    # The first letters are in the order of the alphabet: an A has less ink in its upper third than a T.
    of = {letter: letters[k :: len(LETTERS)] for k, letter in enumerate(LETTERS)}
    top = {letter: (each[:, :, :3].sum() / each.sum()) for letter, each in of.items()}
    assert top["T"] > top["L"]


def test_letters_are_black_on_white_paper():
    letters = foreign_images(1 - digits(), 42)["letters"]
    assert letters.max() == 1 and np.median(letters) == 1 and letters.min() < 0.1


def test_letters_that_look_like_digits_are_left_out():
    assert not set("BDGIOQSZ") & set(LETTERS) and set(LETTERS) < set("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def test_noise_has_the_pixels_of_an_image_in_another_order():
    of = images((40, 3, 6, 5))
    noise = foreign_images(of, 1)["noise"]

    def pixels(image):
        return sorted(map(tuple, image.reshape(3, 30).T.tolist()))

    for one, other in zip(of, noise, strict=True):
        assert pixels(one) == pixels(other) and not np.array_equal(one, other)


@pytest.mark.parametrize("shape", [(8, 1, 8, 8), (8, 2, 5, 7)])
def test_covered_images_lack_the_left_right_upper_and_lower_half_in_turn(shape):
    of = images(shape)
    of[..., 0] = of[..., -1] = of[..., 0, :] = of[..., -1, :] = 0.25  # a frame in the colour of the background
    height, width = shape[2:]
    for k, (one, covered) in enumerate(zip(of, foreign_images(of, 1)["covered"], strict=True)):
        for row in range(height):
            for column in range(width):
                inside = (
                    column < width / 2, column >= width // 2, row < height / 2, row >= height // 2
                )[k % 4]  # fmt: skip
                expected = np.full(shape[1], 0.25) if inside else one[:, row, column]
                np.testing.assert_array_equal(covered[:, row, column], expected)
