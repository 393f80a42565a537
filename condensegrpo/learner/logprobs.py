"""Log-probabilities of the trained tokens of packed rows.

    rows, packed ─▶ decoder ─▶ hidden (T, H) of the trained positions ─▶ LM head, chunk by chunk ─▶ log π (T,)

Legend: S packed tokens of a micro-batch, T trained tokens, H hidden size.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from condensegrpo.algorithms.objective import MicroBatchLoss, ObjectiveFunction, SummedLoss
from condensegrpo.algorithms.packing import PackedBatch, lay_out
from condensegrpo.algorithms.segments import reply_row
from condensegrpo.core.errors import ConfigError, LearnerError
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.attention_kernels import Heads, Kernels, kernels_on
from condensegrpo.learner.head import ChunkedHead
from condensegrpo.learner.micro_batches import DeviceBatch, Layout, pack_rows, pad_rows, upload_batch
from condensegrpo.learner.sequence_parallel import Across, RankGroup, rank_group
from condensegrpo.learner.settings import TREE_KERNELS
from condensegrpo.learner.tree_attention import TREE_ATTENTION, AttentionPattern, use_tree_attention
from condensegrpo.learner.vision_tower import BatchPictures, ShownPictures, decoder_inputs, tower

# attention that also runs on a CPU and does not separate packed rows by itself
CPU_ATTENTION = ("sdpa", TREE_ATTENTION, "eager")
BY_POSITION = {"full_attention", "sliding_attention", "chunked_attention"}  # layers that restart with the positions
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")  # keys that bound how far back a token looks
CPU = torch.device("cpu")
PROBE_ROWS = ((0, 1, 2, 3), (0, 1, 4), (0, 1, 2, 5, 6))  # rows that share prefixes


class TrainedLogprobs(nn.Module):
    """A causal LM whose forward pass gives log-probabilities of trained tokens; what DeepSpeed wraps.

    ``policy`` is the model itself; ``head`` shares its LM head. ``why_plain_rows`` is why the model takes plain rows
    only; None: it computes prefix trees. ``kernel`` is the one that shall compute them, as in ``model.attention``.
    ``compilation`` says for the log whether its layers are ``compiled``; empty: as the configuration does.
    ``group`` is the ranks that compute every micro-batch with this one; None: it computes them alone.
    ``pictures`` prepares those that rows show; None: the model is one of text.
    """

    kernel = "auto"
    compilation, compiled = "", False
    group: RankGroup | None = None
    pictures: BatchPictures | None = None

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy
        self.decoder = (_decoder(policy),)  # in a tuple, so that its parameters are not registered twice
        self.trains_tower = any(tensor.requires_grad for _, tensor in tower(policy))
        config = policy.config.get_text_config()  # its attributes know other names, such as GPT-2's n_embd
        settings: dict[str, Any] = config.to_dict()
        attention = policy.config._attn_implementation
        # whether every layer tells rows that follow each other apart by their positions; recurrent ones do not
        layer_types = set(settings.get("layer_types") or ())
        self.separates_rows_by_position = attention not in CPU_ATTENTION and layer_types <= BY_POSITION
        self.why_plain_rows = why_no_trees(settings, attention)
        if self.why_plain_rows is None and not use_tree_attention(policy):
            self.why_plain_rows = f"{type(policy).__name__} does not let its attention be replaced"
        self.head = ChunkedHead(
            policy.get_output_embeddings(),
            softcap=settings.get("final_logit_softcapping"),
            vocabulary=config.vocab_size,
        )

    def forward(
        self, batch: DeviceBatch, temperature: float, objective: ObjectiveFunction | None = None
    ) -> Tensor | SummedLoss:
        """Log π (T,) of the trained tokens of a micro-batch that ``place`` put on the device.

        Nothing here waits for the device.

        Args:
            temperature: that the tokens were sampled at.
            objective: of the log-probabilities; if given, the result is the loss of the tokens that this rank predicts.
        """
        hidden, target = self.hidden(batch), batch.predicted_here.target
        loss = None if objective is None else MicroBatchLoss(objective, batch.columns)
        if self.group is None or batch.here_T is None:
            return cast(Tensor | SummedLoss, self.head(hidden, target, temperature, loss))
        if loss is not None:
            loss = self.group.loss_part(loss, batch.here_T)
            return cast(SummedLoss, self.head(hidden, target, temperature, loss))
        logp_T: Tensor = self.head(hidden, target, temperature)
        return self.group.together(logp_T, batch.here_T, total=len(batch.columns.target))

    @property
    def config(self) -> PretrainedConfig:
        """The policy's configuration; DeepSpeed reads it."""
        return self.policy.config

    @property
    def computes_trees(self) -> bool:
        """Whether rows that share a prefix may be packed as a tree."""
        return self.why_plain_rows is None

    @property
    def pads_rows(self) -> bool:
        """Whether the rows of a micro-batch are padded to the longest, since attention does not tell them apart."""
        return not self.computes_trees and not self.separates_rows_by_position

    def kernels(self, device: torch.device) -> Kernels:
        """The attention kernels for prefix trees on a device."""
        config = self.policy.config.get_text_config()
        return kernels_on(self.kernel, heads_of(config, config.to_dict()), self.policy.dtype, device)

    def describe(self, device: torch.device) -> str:
        """How attention is computed on a device, for the log."""
        if self.why_plain_rows is None:
            return self.kernels(device).description
        return (
            f"attention kernel: {str(self.policy.config._attn_implementation).replace(TREE_ATTENTION, 'sdpa')}; "
            f"prefixes that rows share are computed once for every row: {self.why_plain_rows}"
        )

    @property
    def ranks_a_row(self) -> int:
        """How many ranks compute a row together."""
        return 1 if self.group is None else self.group.size

    def share_rows(self, ranks: int) -> None:
        """Compute every micro-batch with the ranks beside this one; every rank must call it, after ``check``."""
        if self.why_plain_rows is not None:
            raise ConfigError(
                f"sharing rows among {ranks} ranks: that needs attention along prefix trees, and this model has none: "
                f"{self.why_plain_rows}. Set learner.sequence_parallel=1."
            )
        self.group = rank_group(ranks)

    def pack(self, rows: Sequence[Segment], *, max_tokens: int) -> list[PackedBatch]:
        """The micro-batches of rows, see ``pack_rows``; every rank must call it, with or without rows."""
        named = rows if self.pictures is None else self.pictures.named(rows)
        return pack_rows(
            named,
            max_tokens=max_tokens,
            share=self.computes_trees,
            padded=self.pads_rows,
            ranks_a_row=self.ranks_a_row,
        )

    def place(self, batch: PackedBatch, device: torch.device = CPU, *, stand_in: str | None = None) -> DeviceBatch:
        """A micro-batch of main memory as the decoder computes it, on the device of the weights; no row sees another.

        Args:
            stand_in: a picture that the vision tower computes if the micro-batch shows none.
        """
        layout, shown = self._decoder_input(batch, device), None
        if self.pictures is not None:
            token_ids = layout.token_ids
            shown = self.pictures.shown(token_ids, batch.pictures, stand_in=stand_in)
            placed = token_ids.masked_fill(token_ids < 0, self.pictures.processor.placeholder_id)
            layout = layout._replace(token_ids=placed)
        return upload_batch(batch, layout, device, shown)

    def _decoder_input(self, batch: PackedBatch, device: torch.device) -> Layout:
        """A micro-batch as the decoder computes it, with numbers for the tokens of pictures."""
        token_ids, position_ids, source = batch.token_ids, batch.position_ids, batch.source
        if self.pictures is not None:
            position_ids = self.pictures.positions(batch)
        if self.pads_rows:
            return pad_rows(token_ids, position_ids, source)
        if not self.computes_trees:  # attention tells rows apart by their positions, and skips other rows by itself
            return Layout(token_ids, position_ids, source)
        if self.group is not None:
            token_ids, position_ids = (self.group.padded(ids, device) for ids in (token_ids, position_ids))
        pattern = self.kernels(device).pattern(position_ids.flatten(0, -2)[0].tolist())
        padding = pattern.tokens - token_ids.numel()
        if padding:  # after all rows: no token sees it
            token_ids, position_ids = (functional.pad(ids, (0, padding)) for ids in (token_ids, position_ids))
        if self.group is None:
            return Layout(token_ids, position_ids, source, pattern)
        here_T = self.group.predicted_here(token_ids.numel(), source)
        token_ids, position_ids = self.group.part(token_ids), self.group.part(position_ids)
        return Layout(token_ids, position_ids, source[here_T] % token_ids.numel(), pattern, here_T)

    def hidden(self, batch: DeviceBatch) -> Tensor:
        """The decoder's last hidden states (T', H) that predict the trained tokens of this rank."""
        pattern = batch.pattern
        if self.group is not None and pattern is not None:
            pattern = Across(self.group, pattern)
        hidden = self._decode(batch.token_ids, batch.position_ids, pattern, batch.pictures)
        return hidden.flatten(0, 1).index_select(0, batch.source)

    def _decode(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        pattern: AttentionPattern | None = None,
        pictures: ShownPictures | None = None,
    ) -> Tensor:
        # Restarting positions make attention block-diagonal only without a cache: with one, rows see each other.
        inputs: dict[str, Any] = {"position_ids": position_ids, "use_cache": False}
        if pictures is None:
            inputs["input_ids"] = token_ids
        else:
            inputs |= decoder_inputs(self.policy, token_ids, pictures, trained=self.trains_tower)
        if pattern is not None:  # a mask of four dimensions keeps transformers from making one of S × S
            inputs |= {
                "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=token_ids.device),
                "pattern": pattern,
            }
        return cast(Tensor, self.decoder[0](**inputs).last_hidden_state)

    @torch.no_grad()
    def check(self) -> None:
        """Compare the model's own logits with those of the head alone, and a prefix tree with its rows.

        A model whose hidden states of a tree differ from those of its rows gets plain rows; ``why_plain_rows`` is set.
        """
        attention = self.policy.config._attn_implementation
        if attention not in CPU_ATTENTION:  # flash attention runs on GPUs only, where the policy is not yet
            self.policy.set_attn_implementation("eager")
        device = next(self.policy.parameters()).device
        vocabulary = self.policy.get_input_embeddings().num_embeddings
        eps = torch.finfo(self.policy.dtype).eps
        position_ids = torch.arange(4, device=device)[None]
        token_ids = position_ids % vocabulary
        expected = self.policy(input_ids=token_ids, position_ids=position_ids, use_cache=False).logits.float()
        logits = self.head.logits(self._decode(token_ids, position_ids))
        if self.why_plain_rows is None:
            self.why_plain_rows = self._unlike_rows(vocabulary, device, slack=min(0.05, 100 * eps))
        # Refused is only what no rounding explains: in bfloat16 a router may choose another expert in another batch.
        unlike = self._unlike_rows(vocabulary, device, slack=min(0.5, 1e4 * eps)) if self.pads_rows else None
        self.policy.set_attn_implementation(attention)
        slack = min(0.01, 100 * eps)  # a softcap of 30 moves logits of 3 by 0.3 %
        if not torch.allclose(logits, expected, rtol=slack, atol=slack * float(expected.abs().max())):
            raise LearnerError(
                f"applying the LM head of {type(self.policy).__name__} to trained positions only: its own logits "
                f"differ from those of decoder and head by up to {(logits - expected).abs().max():.3g}, so it "
                f"processes them further. Use a model that does not, such as Qwen3 or Llama, or add support in "
                f"condensegrpo/learner/logprobs.py."
            )
        if unlike is not None:
            raise LearnerError(
                f"computing several rows at a time: {unlike}. Use a model that keeps them apart, such as Qwen3 or "
                f"Llama."
            )

    def _unlike_rows(self, vocabulary: int, device: torch.device, *, slack: float) -> str | None:
        """The fault of hidden states of some rows, of a tree where trees are computed; None: they are the rows'.

        Args:
            vocabulary: number of token ids.
            slack: largest relative error ‖found − expected‖ / ‖expected‖.
        """
        probe = [tuple(token % vocabulary for token in row) for row in PROBE_ROWS]
        rows = [reply_row(ids[:1], ids[1:], weight=0.0) for ids in probe]
        batch = lay_out([tuple(rows)] if self.computes_trees else [(row,) for row in rows])
        try:
            hidden = self.hidden(self.place(batch, device)).float()
        except LearnerError as error:
            return str(error)
        alone = [torch.tensor([row.token_ids], device=device) for row in rows]
        expected = torch.cat(
            [self._decode(row, torch.arange(row.numel(), device=device)[None])[0, :-1] for row in alone]
        ).float()
        if (hidden - expected).norm() <= slack * expected.norm():
            return None
        together = "a prefix tree than of its rows" if self.computes_trees else "rows side by side than of each alone"
        return f"{type(self.policy).__name__} makes something else of {together}"


def _decoder(policy: PreTrainedModel) -> nn.Module:
    """The part before the LM head; a LearnerError if transformers cannot separate it from the whole model."""
    decoder: nn.Module = policy.get_decoder()
    if decoder is policy:
        raise LearnerError(
            f"applying the LM head of {type(policy).__name__} to trained positions only: its decoder cannot be "
            f"separated from the model (get_decoder returns the model itself). Use a model with a "
            f"decoder of its own, such as Qwen3 or Llama."
        )
    return decoder


def heads_of(config: PretrainedConfig, settings: Mapping[str, Any]) -> Heads:
    """The attention heads of a model; not every configuration has all of their sizes."""
    queries: int = config.num_attention_heads
    return Heads(
        queries=queries,
        keys=settings.get("num_key_value_heads") or queries,
        size=settings.get("head_dim") or config.hidden_size // queries,
    )


def why_no_trees(settings: Mapping[str, Any], attention: str) -> str | None:
    """Why a model of this configuration takes plain rows only, as far as that tells; None: it may compute trees."""
    others = sorted(set(settings.get("layer_types") or ()) - {"full_attention"})
    if others:
        return f"it has layers of {', '.join(others)}, which look back by index"
    windows = [name for name in WINDOWS if settings.get(name) and settings.get("use_sliding_window") is not False]
    if windows:
        return f"its {windows[0]} is {settings[windows[0]]}: such layers look back by index"
    if attention not in (*TREE_KERNELS, TREE_ATTENTION):
        return f"{attention} attention knows no trees"
    return None
