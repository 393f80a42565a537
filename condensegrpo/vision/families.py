"""What differs between the families of models that see: how a picture is prepared, and what stands for it in a prompt.

The rules are those of the families' processors in transformers; a test compares the ids. A picture's tokens depend on
that picture alone, so that a prompt can grow by pictures without changing what it began with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PretrainedConfig


class Prepared(NamedTuple):
    """A picture as the image processor gives it."""

    pixels: Mapping[str, "Tensor"]  # arguments of the model's ``get_image_features``
    grid: tuple[int, int]  # rows and columns: of patches, of tiles (0, 0: one picture without tiles), or (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family."""

    model_types: tuple[str, ...]
    prepare: Callable[[Any, "Image"], Prepared]  # image processor of transformers, picture in RGB
    expand: Callable[["PretrainedConfig", str, tuple[int, int]], str]  # model's config, placeholder token, grid → text
    three_axes: bool = False  # positions have three axes: time, row and column
    joined_along: int = 0  # the dimension of pixels along which the tower takes several pictures at once

    def joined(self, pixels: Sequence[Mapping[str, "Tensor"]]) -> dict[str, "Tensor"]:
        """The arguments of the model's ``get_image_features`` for several pictures, from those for each."""
        from torch import cat

        return {name: cat([each[name] for each in pixels], dim=self.joined_along) for name in pixels[0]}


def family_of(model_type: str) -> Family | None:
    """The family of models of a type; None: none of them, or the models see nothing."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def _patches(image_processor: Any, picture: "Image") -> Prepared:  # noqa: ANN401  transformers' classes are untyped
    pixels = dict(image_processor([picture], return_tensors="pt"))
    _, rows, columns = pixels["image_grid_thw"][0].tolist()
    return Prepared(pixels, (rows, columns))


def _expand_patches(config: "PretrainedConfig", token: str, grid: tuple[int, int]) -> str:
    """One token for each ``spatial_merge_size``² patches; dynamic resolution."""
    merge: int = config.vision_config.spatial_merge_size
    return token * (grid[0] * grid[1] // merge**2)


def _tiles(image_processor: Any, picture: "Image") -> Prepared:  # noqa: ANN401  transformers' classes are untyped
    pixels = dict(image_processor([[picture]], return_row_col_info=True, return_tensors="pt"))
    rows, columns = (int(pixels.pop(name)[0][0]) for name in ("rows", "cols"))
    return Prepared(pixels, (rows, columns))


def _expand_tiles(config: "PretrainedConfig", token: str, grid: tuple[int, int]) -> str:
    """The same number of tokens for each tile, row by row, and for the whole picture scaled down at the end."""
    vision = config.vision_config
    tokens = token * ((vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2)
    edge, whole = "<fake_token_around_image>", f"<global-img>{tokens}"
    rows = [
        "".join(f"{edge}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(grid[1])) + "\n"
        for row in range(grid[0])
    ]
    return "".join((*rows, "\n" if rows else "", edge, whole, edge))


def _square(image_processor: Any, picture: "Image") -> Prepared:  # noqa: ANN401  transformers' classes are untyped
    # as one of two: alone in a prompt, a picture would have more tokens than beside a second one
    pixels = dict(image_processor([[picture, picture]], return_tensors="pt"))
    return Prepared(pixels | {name: pixels[name][:1].clone() for name in ("pixel_values", "image_sizes")}, (1, 1))


def _expand_square(config: "PretrainedConfig", token: str, grid: tuple[int, int]) -> str:
    """One token for each patch of a square of fixed size, and one for the end of the row."""
    side: int = config.vision_config.image_size // config.vision_config.patch_size
    class_token = config.vision_feature_select_strategy == "default"
    return token * (side**2 if class_token else side**2 + 1)


FAMILIES = (
    Family(model_types=("qwen2_5_vl", "qwen3_vl"), prepare=_patches, expand=_expand_patches, three_axes=True),
    Family(model_types=("smolvlm", "idefics3"), prepare=_tiles, expand=_expand_tiles, joined_along=1),
    Family(model_types=("llava_onevision",), prepare=_square, expand=_expand_square),
)
