"""Policies with random weights in the shapes of models that people train.

python -m gpu.policy models 0.14b 0.6b-text     writes models/0.14b, and models/0.6b-text, which knows every text
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from passes import ModelSize

from condensegrpo.learner.devices import DTYPES, empty_cache
from condensegrpo.learner.new_model import new_tokenizer, save_new
from condensegrpo.studies.tasks import notes
from gpu.record import device, dtype

LEARNED = 2048  # tokens of text, at most

SHAPES = {
    "toy": ModelSize(layers=2, hidden=64, heads=2, kv_heads=1, head=32, ffn=128, vocabulary=2048),
    "0.14b": ModelSize(layers=30, hidden=576, heads=9, kv_heads=3, head=64, ffn=1536, vocabulary=49152),
    "0.6b": ModelSize(layers=28, hidden=1024, heads=16, kv_heads=8, head=128, ffn=3072, vocabulary=151936),
    "1.5b": ModelSize(layers=28, hidden=1536, heads=12, kv_heads=2, head=128, ffn=8960, vocabulary=151936),
    # layers of a model of 7 B parameters, as many as fit on a GPU with their optimiser
    "7b-8-layers": ModelSize(layers=8, hidden=3584, heads=28, kv_heads=4, head=128, ffn=18944, vocabulary=152064),
}


def random_policy(models: Path, shape: str, *, reads: bool = False) -> Path:
    """The folder of a policy, written unless it is there.

    Its words are w0, w1, …, any other is unknown; one that ``reads`` knows every text, and its replies are words too.
    """
    size, folder = SHAPES[shape], models / (f"{shape}-text" if reads else shape)
    if (folder / "config.json").exists():
        return folder
    if reads:
        text = Path(notes.__file__).read_text(encoding="utf-8")
        tokenizer = new_tokenizer([text], kind="bpe", vocab_size=min(LEARNED, size.vocabulary))
    else:
        words = " ".join(f"w{number}" for number in range(size.vocabulary - 8))  # and special tokens
        tokenizer = new_tokenizer([words], kind="words", vocab_size=size.vocabulary)
    model = size.build(seed=0, dtype=DTYPES[dtype()], device=device())
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    models.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=models) as around:
        made = Path(around, "policy")
        save_new(made, tokenizer, model)
        file = made / "tokenizer.json"
        state = json.loads(file.read_bytes())
        known = state["model"]["vocab"]  # the rest of the vocabulary is sampled, and no text has it
        known |= {f"w{number}": number for number in range(len(known), size.vocabulary)}
        file.write_text(json.dumps(state), encoding="utf-8")
        made.rename(folder)
    del model
    empty_cache()
    return folder


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(random_policy(Path(sys.argv[1]), name.removesuffix("-text"), reads=name.endswith("-text")))
