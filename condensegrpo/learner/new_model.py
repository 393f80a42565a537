"""Makes a small model, which may see, for runs that download nothing."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.model_folder import auto_class, sees
from condensegrpo.learner.new_tokenizer import BEGIN, END, PAD, UNKNOWN, tiny_tokenizer
from condensegrpo.learner.settings import NewModel, NewPictures

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

IMAGE = "<image>"  # the template writes it for a picture; its positions take the embeddings
# the last ids of the vocabulary; see ``vision/processor.py``
SPECIAL = ("<fake_token_around_image>", "<global-img>", IMAGE)

WHITE = [1.0, 1.0, 1.0]  # is 0 for the model, so that what is drawn on light paper stands out of it
PATCH_STD, POSITION_STD = 2.0, 1.5  # of the initial embeddings: of a patch by its weights, and of its position

SHOWN = """\
{%- macro shown(content) -%}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}{{- '<image>' if part['type'] == 'image' else part['text'] }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
CONTENT = "'\\n' + (message['content'] or '')"  # in ``new_tokenizer.CHAT_TEMPLATE``


def seeing_tokenizer(tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedTokenizerFast":
    """A new tokenizer with the tokens and the chat template of a model that sees."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)}, replace_extra_special_tokens=False)
    before, content, after = str(tokenizer.chat_template).partition(CONTENT)
    assert content, "the template writes no content of messages that could show pictures"
    tokenizer.chat_template = f"{SHOWN}{before}'\\n' + shown(message['content'] or ''){after}"
    return tokenizer


def seeing_config(text: "Qwen3Config", pictures: NewPictures) -> "PretrainedConfig":
    """The configuration of a model that sees, around that of its text model."""
    from transformers import SmolVLMConfig  # here: it takes two seconds that a dry run need not wait for

    return SmolVLMConfig(
        text_config=text.to_dict(),
        vision_config={
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": pictures.layers,
            "num_attention_heads": text.num_attention_heads,
            "image_size": pictures.size,
            "patch_size": pictures.patch,
            "initializer_range": pictures.initializer_range,
        },
        scale_factor=1,
        image_token_id=text.vocab_size - 1,
        pad_token_id=text.pad_token_id,
        tie_word_embeddings=text.tie_word_embeddings,
        dtype=text.dtype,
    )


def initialise_patches(model: "PreTrainedModel") -> None:
    """Draw the initial embeddings of patches, and those of their positions, which are of the same order.

    A position begins as the sum of a vector of its row and one of its column, so that both can be read from it.
    """
    import torch

    embeddings = model.model.vision_model.embeddings
    side = embeddings.num_patches_per_side
    with torch.no_grad():
        embeddings.patch_embedding.weight.normal_(0, PATCH_STD)
        row, column = torch.randn(2, side, embeddings.embed_dim) * (POSITION_STD / 2**0.5)
        embeddings.position_embedding.weight.copy_((row[:, None] + column).flatten(0, 1))


def save_image_processor(folder: Path, *, size: int, patch: int) -> None:
    """Write what scales pictures to the square of ``size`` pixels a side that the model sees.

    A patch of ``patch`` × ``patch`` black pixels has a norm of √3: a step of Adam, which moves each weight alike, would
    move the embedding of a patch with a norm of its number of pixels much farther than anything else.
    """
    try:
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    except ModuleNotFoundError as error:
        raise ConfigError(
            "making the model of model.new.pictures: it needs transformers from 5.4 on, and an older one is installed. "
            "Run pip install 'transformers>=5.4,<6', or leave out model.new.pictures."
        ) from error
    edge = {"longest_edge": size}
    SmolVLMImageProcessorPil(
        size=edge, max_image_size=edge, do_image_splitting=False, image_mean=WHITE, image_std=[float(patch)] * 3
    ).save_pretrained(folder)


def new_tokenizer(
    corpus: Iterable[str], *, kind: Literal["words", "bpe"], vocab_size: int
) -> "PreTrainedTokenizerFast":
    """``TinyTokenizer`` as transformers has tokenizers."""
    from transformers import PreTrainedTokenizerFast  # here: it takes a second that a dry run need not wait for

    made = tiny_tokenizer(corpus, kind=kind, vocab_size=vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        bos_token=None,
        eos_token=END,
        pad_token=PAD,
        unk_token=None if made.unk_token_id is None else UNKNOWN,
        additional_special_tokens=[BEGIN],
        chat_template=made.chat_template,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: "PreTrainedTokenizerFast", new: NewModel, *, seed: int) -> "PreTrainedModel":
    """A model of this size in fp32 with tied embeddings and random weights that depend on ``seed`` and nothing else.

    Its vocabulary is the tokenizer's. The random state of torch is left as it was found.
    """
    import torch

    config = new_config(new, vocab_size=len(tokenizer))
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.eos_token_id, part.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = auto_class(config).from_config(config).to(torch.float32)
        if new.pictures is not None:
            initialise_patches(model)
        return model


def new_config(new: NewModel, *, vocab_size: int) -> "PretrainedConfig":
    """The configuration of a new model, without the ids of its tokenizer's special tokens."""
    from transformers import Qwen3Config  # here: it takes two seconds that a dry run need not wait for

    text = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=new.hidden_size,
        intermediate_size=new.ffn_size,
        num_hidden_layers=new.layers,
        num_attention_heads=new.heads,
        num_key_value_heads=new.heads,
        head_dim=new.hidden_size // new.heads,
        max_position_embeddings=new.max_positions,
        initializer_range=new.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    return text if new.pictures is None else seeing_config(text, new.pictures)


def save_new(folder: Path, tokenizer: "PreTrainedTokenizerFast", model: "PreTrainedModel") -> None:
    """Write a folder that the classes of ``transformers`` load, with the image processor of a model that sees."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    if sees(model.config):
        vision = model.config.vision_config
        save_image_processor(folder, size=vision.image_size, patch=vision.patch_size)
