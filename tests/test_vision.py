"""Pictures: opened, prepared under the rule of each family, and placed as the family's model places them."""

import io
import zlib
from pathlib import Path

import pytest
import torch
from command import succeed_as_script
from PIL import Image
from vision_models import FAMILIES, FamilyName, family_processor, picture, vision_model

from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.messages import MediaPart
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.features import picture_features, three_axis_positions
from condensegrpo.vision.image_files import open_picture
from condensegrpo.vision.processor import PictureProcessor, Prepared, PreparedPictures, load_picture_processor

SIZES = ((56, 56), (40, 20), (20, 100))


def encoded(drawn: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    drawn.save(file, kind, **options)
    return file.getvalue()


def processor(family: FamilyName, folder: Path) -> tuple[torch.nn.Module, PictureProcessor]:
    model = vision_model(family, folder)
    loaded = load_picture_processor(str(folder), MediaFolder(folder / "media"))
    assert loaded is not None
    return model, loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_has_the_ids_and_pixels_of_the_familys_processor(family: FamilyName, tmp_path: Path) -> None:
    _, ours = processor(family, tmp_path)
    theirs, media = family_processor(family), MediaFolder(tmp_path / "media")
    for size in SIZES:
        part = media.write(picture(*size))
        image = open_picture(media.read(part.sha256), "it")
        whole = theirs(images=[[image, image]], text=[ours.placeholder * 2], return_tensors="pt")
        assert ours.picture_ids(part.sha256) * 2 == tuple(whole["input_ids"][0].tolist())
        assert ours.picture_tokens(part.sha256) * 2 == whole["input_ids"].shape[1]
        pixels = ours.pixels(part.sha256)
        mine = torch.cat([pixels["pixel_values"]] * 2, dim=1 if family in ("smolvlm", "idefics3") else 0)
        assert torch.equal(mine, whole["pixel_values"])


def test_prepared_pictures_are_kept_up_to_a_number_of_bytes() -> None:
    kept, made = PreparedPictures(most=100), list[str]()

    def of(key: str, numbers: int) -> None:
        def prepare() -> Prepared:
            made.append(key)
            return Prepared({"pixels": torch.zeros(numbers)}, (1, 1))

        assert kept.of(key, prepare).pixels["pixels"].numel() == numbers

    for key in ("a", "b", "a", "c", "a", "b"):  # 40 bytes each: c takes the place of b, which was used before a
        of(key, 10)
    assert made == ["a", "b", "c", "b"]
    of("large", 50)
    of("large", 50)
    of("a", 10)
    assert made[4:] == ["large", "a"]


def test_renderer_and_learner_prepare_a_picture_once(tmp_path: Path) -> None:
    _, first = processor("smolvlm", tmp_path)
    second = load_picture_processor(str(tmp_path), MediaFolder(tmp_path / "media"))
    assert second is not None
    part = MediaFolder(tmp_path / "media").write(picture(40, 20))
    assert first.picture_tokens(part.sha256) == second.picture_tokens(part.sha256)
    assert second.pixels(part.sha256) is first.pixels(part.sha256)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_one_for_each_placeholder(family: FamilyName, tmp_path: Path) -> None:
    model, ours = processor(family, tmp_path)
    part = MediaFolder(tmp_path / "media").write(picture(40, 20))
    features = picture_features(model, ours.pixels(part.sha256))
    count = ours.picture_ids(part.sha256).count(ours.placeholder_id)
    assert features.embeddings.shape == (count, 32)
    assert [level.shape for level in features.deepstack] == ([(count, 32)] * 2 if family == "qwen3_vl" else [])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_three_axes_are_the_models_rope_index(family: FamilyName, tmp_path: Path) -> None:
    model, ours = processor(family, tmp_path)
    media = MediaFolder(tmp_path / "media")
    hashes = [media.write(picture(*size)).sha256 for size in SIZES]
    ids = [1, 2, *ours.picture_ids(hashes[0]), 3, *ours.picture_ids(hashes[1]), 4, 5, *ours.picture_ids(hashes[2]), 6]
    found = three_axis_positions(
        ids, placeholder_id=ours.placeholder_id, grids=[ours.grid(picture) for picture in hashes], merge=2
    )
    row = torch.tensor([ids])
    grids = torch.cat([ours.pixels(picture)["image_grid_thw"] for picture in hashes])
    wanted, _ = model.model.get_rope_index(row, (row == ours.placeholder_id).int(), image_grid_thw=grids)
    assert torch.equal(torch.tensor(found), wanted[:, 0])


def test_positions_of_other_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="3 placeholders in a row, where a picture of 1 × 2 cells is due"):
        three_axis_positions([1, 9, 9, 9], placeholder_id=9, grids=[(2, 4)], merge=2)
    with pytest.raises(ValueError, match="1 pictures, and fewer runs"):
        three_axis_positions([1], placeholder_id=9, grids=[(2, 4)], merge=2)


def bomb() -> bytes:
    """The header of a PNG of 60,000 × 60,000 pixels."""
    header = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    chunk = len(header[4:]).to_bytes(4, "big") + header + zlib.crc32(header).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT" + bytes(8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot identify image file"),
        (b"no picture", "cannot identify image file.*one of the formats PNG, JPEG"),
        (encoded(Image.new("RGB", (90, 90)), "PNG")[:-40], "Wanted a whole file"),
        (encoded(Image.new("RGB", (99, 99), (1, 2, 3)), "JPEG")[:-400], "Wanted a whole file"),
        (encoded(Image.new("RGB", (9, 9)), "TIFF"), "cannot identify image file"),
        (bomb(), "50,000,000 pixels are decoded. Scale it down"),
        (encoded(Image.new("1", (10_000, 6_000)), "PNG"), "10000 × 6000 pixels, at most 50,000,000"),
        (
            encoded(Image.new("RGB", (9, 9)), "GIF", save_all=True, append_images=[Image.new("RGB", (9, 9), "red")]),
            "it is animated",
        ),
    ],
    ids=["empty", "text", "cut-png", "cut-jpeg", "tiff", "bomb", "large", "animated"],
)
def test_what_is_no_whole_picture_is_a_data_error(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_picture(data, "it")


@pytest.mark.parametrize("mode", ["CMYK", "P", "RGBA", "L", "1"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    opened = open_picture(encoded(Image.new(mode, (5, 4)), "JPEG" if mode == "CMYK" else "PNG"), "it")
    assert (opened.mode, opened.size) == ("RGB", (5, 4))


def test_what_the_image_processor_refuses_is_a_data_error(tmp_path: Path) -> None:
    _, ours = processor("qwen2_5_vl", tmp_path)
    thin = MediaFolder(tmp_path / "media").write(picture(900, 4))
    with pytest.raises(DataError, match="of 900 × 4 pixels: the image processor of the model refuses it"):
        ours.picture_ids(thin.sha256)


def test_a_part_with_the_bytes_of_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="its bytes have another hash"):
        MediaFolder(tmp_path).write(MediaPart(sha256="a" * 64, type="image/png", data=b"x"))


def test_a_text_model_has_no_picture_processor_and_a_missing_one_is_a_configuration_error(tmp_path: Path) -> None:
    from tiny import qwen3, tokenizer

    qwen3().save_pretrained(tmp_path / "text")
    tokenizer().save_pretrained(tmp_path / "text")
    assert load_picture_processor(str(tmp_path / "text"), MediaFolder(tmp_path)) is None
    vision_model("qwen2_5_vl", tmp_path / "bare")
    (tmp_path / "bare" / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="loading the image processor of"):
        load_picture_processor(str(tmp_path / "bare"), MediaFolder(tmp_path))


def test_a_text_run_imports_no_image_processors(tmp_path: Path) -> None:
    from tiny import qwen3, tokenizer

    qwen3().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, sys; from pathlib import Path; from condensegrpo.core.trajectory import SamplingParams; "
        "from condensegrpo.samplers.transformers import TransformersSampler; "
        "from condensegrpo.storage.media import MediaFolder; "
        "processors = 'transformers.models.auto.image_processing_auto'; print(processors in sys.modules); "
        "sampler = TransformersSampler(sys.argv[1], device='cpu', media=MediaFolder(Path('media'))); "
        "asyncio.run(sampler.sample((1, 2), SamplingParams(max_tokens=2))); print(processors in sys.modules)"
    )
    assert succeed_as_script(program, str(tmp_path)) == "False\nFalse\n"
