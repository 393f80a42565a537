"""The picture processor of a model: the text for a picture in a prompt, and its pixels as the model takes them.

The families of models that see differ in how a picture is prepared and expanded. The rules are those of the families'
processors in transformers; a test compares the ids. A picture's tokens depend on that picture alone, so that a prompt
can grow by pictures without changing its beginning.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.protocols.pictures import MediaStore
from condensegrpo.vision.image_files import open_picture

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PIXELS_KEPT = 2**27  # bytes of pixels that a process keeps, a rollout worker too; a screen in Qwen2.5-VL has 20 MB
SIZES_KEPT = 65536  # pictures whose sizes are kept


class Prepared(NamedTuple):
    """A picture as the image processor gives it."""

    pixels: Mapping[str, "Tensor"]  # arguments of the model's ``get_image_features``
    grid: tuple[int, int]  # rows and columns: of patches, of tiles (0, 0: one picture without tiles), or (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models that see: how a picture is prepared, and written in a prompt."""

    model_types: tuple[str, ...]
    prepare: Callable[[Any, "Image"], Prepared]  # (image processor of transformers, picture in RGB)
    expand: Callable[["PretrainedConfig", str, tuple[int, int]], str]  # (config, placeholder token, grid) → text
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
    return token * (side**2 if config.vision_feature_select_strategy == "default" else side**2 + 1)


FAMILIES = (
    Family(model_types=("qwen2_5_vl", "qwen3_vl"), prepare=_patches, expand=_expand_patches, three_axes=True),
    Family(model_types=("smolvlm", "idefics3"), prepare=_tiles, expand=_expand_tiles, joined_along=1),
    Family(model_types=("llava_onevision",), prepare=_square, expand=_expand_square),
)


class PreparedPictures:
    """Prepared pictures of at most so many bytes of pixels, those last used. Several threads may use it."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._kept = OrderedDict[Hashable, Prepared]()  # the last used at the end
        self._lock = Lock()

    def of(self, key: Hashable, prepare: Callable[[], Prepared]) -> Prepared:
        """The picture of a key, prepared if it is not kept. The newest is kept, whatever its size."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        prepared = prepare()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = prepared
                self._bytes += _bytes(prepared)
            while self._bytes > self._most and len(self._kept) > 1:
                self._bytes -= _bytes(self._kept.popitem(last=False)[1])
        return prepared


PREPARED = PreparedPictures(PIXELS_KEPT)  # by settings, store and hash: renderer, sampler and learner need the same


class PictureProcessor:
    """Prepares pictures by their hashes, under the rule of the model's family. Several threads may use one."""

    def __init__(
        self,
        *,
        family: Family,
        config: "PretrainedConfig",
        tokenizer: "PreTrainedTokenizerBase",
        image_processor: Any,  # noqa: ANN401  transformers' classes are untyped
        media: MediaStore,
    ) -> None:
        """Use the parts of a model; ``load_picture_processor`` reads them from its folder."""
        self.family = family
        self.placeholder_id: int = config.image_token_id  # where the embeddings of a picture are placed
        self.placeholder = str(tokenizer.convert_ids_to_tokens(self.placeholder_id))  # the template writes it
        self._config = config
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self.media = media
        self._settings = str(image_processor.to_json_string())
        # rows and columns of a picture, see ``Prepared``; raises as ``expansion``
        self.grid = lru_cache(SIZES_KEPT)(lambda sha256: self._prepared(sha256).grid)
        self.picture_ids = lru_cache(SIZES_KEPT)(self._picture_ids)

    def expansion(self, sha256: str) -> str:
        """The text for the placeholder of a picture in a prompt.

        Qwen2.5-VL, 28 × 84 pixels   ─▶   <|image_pad|><|image_pad|><|image_pad|>
        """
        return self.family.expand(self._config, self.placeholder, self.grid(sha256))

    def picture_tokens(self, sha256: str) -> int:
        """How many tokens a picture has in a prompt; raises as ``expansion``."""
        return len(self.picture_ids(sha256))

    def pixels(self, sha256: str) -> Mapping[str, "Tensor"]:
        """The arguments of the model's ``get_image_features`` for this one picture, on the CPU; raises as above."""
        return self._prepared(sha256).pixels

    def _picture_ids(self, sha256: str) -> tuple[int, ...]:
        """The token ids of the expansion; raises as ``expansion``."""
        return tuple(self._tokenizer.encode(self.expansion(sha256), add_special_tokens=False))

    def _prepared(self, sha256: str) -> Prepared:
        return PREPARED.of((self._settings, self.media, sha256), lambda: self._prepare(sha256))

    def _prepare(self, sha256: str) -> Prepared:
        picture = open_picture(self.media.read(sha256), sha256[:12])
        try:
            return self.family.prepare(self._image_processor, picture)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise DataError(
                f"preparing the picture {sha256[:12]} of {picture.width} × {picture.height} pixels: the image "
                f"processor of the model refuses it: {error}"
            ) from error


def load_picture_processor(source: str, media: MediaStore) -> PictureProcessor | None:
    """The picture processor of a model folder or Hub id; None: the model sees nothing, or is of no known family.

    A folder with a tokenizer alone, of a model that is served elsewhere, sees nothing either.
    """
    file = Path(source) / "config.json"
    if Path(source).is_dir() and not file.is_file():
        return None
    from transformers import AutoConfig

    try:
        if file.is_file() and family_of(json.loads(file.read_text(encoding="utf-8")).get("model_type", "")) is None:
            return None  # without its configuration, which takes transformers 20 ms: most models are of text alone
        config = AutoConfig.from_pretrained(source)
        family = family_of(config.model_type)
        if family is None:
            return None
        from transformers import AutoImageProcessor, AutoTokenizer  # not for a model of text alone

        return PictureProcessor(
            family=family,
            config=config,
            tokenizer=AutoTokenizer.from_pretrained(source),
            image_processor=AutoImageProcessor.from_pretrained(source, backend="pil"),
            media=media,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"loading the image processor of {source}: {error} Wanted preprocessor_config.json beside the weights."
        ) from error


def _bytes(prepared: Prepared) -> int:
    return sum(tensor.nbytes for tensor in prepared.pixels.values())
