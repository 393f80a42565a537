"""The sampler transformers with pictures: log-probabilities of the plain model, the same reply in any company."""

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_models import FAMILIES, picture, plain_inputs, vision_model

from condensegrpo.attention.scorer import AttentionScorer
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.messages import History, MediaPart, Message, TextPart, Unit
from condensegrpo.core.protocols.sampler import AttentionQuery, TokenAttention
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.samplers.transformers import TransformersSampler
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.processor import PictureProcessor, load_picture_processor

SIZES = ((40, 20), (20, 40), (24, 24))


@dataclass(frozen=True, slots=True)
class World:
    model: Any
    folder: Path
    processor: PictureProcessor
    pictures: tuple[str, ...]  # hashes; the last two have the same size

    def prompt(self, *parts: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """A prompt of words, and of pictures by negative numbers: −1 is the first."""
        ids, media = list[int](), list[str]()
        for part in parts:
            if part < 0:
                media.append(self.pictures[-part - 1])
                ids += self.processor.picture_ids(media[-1])
            else:
                ids.append(part)
        return tuple(ids), tuple(media)

    def sampler(self, **options: Any) -> TransformersSampler:
        return TransformersSampler(str(self.folder), device="cpu", media=MediaFolder(self.folder / "media"), **options)

    def plain(self, ids: Sequence[int], media: Sequence[str], reply: Sequence[int], temperature: float) -> list[float]:
        """Log-probabilities of a reply by one forward pass of the plain model."""
        with torch.no_grad():
            logits = self.model(**plain_inputs(self.processor, (*ids, *reply), media)).logits[0]
        logp = (logits[len(ids) - 1 : -1] / temperature).log_softmax(dim=-1)
        return logp[range(len(reply)), list(reply)].tolist()

    def attention(self, ids: Sequence[int], media: Sequence[str]) -> torch.Tensor:
        """(L, L) as the plain model gives it out, the mean over the first two layers and all heads."""
        self.model.set_attn_implementation("eager")
        with torch.no_grad():
            given = plain_inputs(self.processor, ids, media)
            found = self.model(**given, output_attentions=True, use_cache=False).attentions
        self.model.set_attn_implementation("sdpa")
        return torch.stack([layer[0].mean(dim=0) for layer in found[:2]]).mean(dim=0)


SOME = ("qwen3_vl", "idefics3")  # for what does not depend on the family: features in the layers, and tiles


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp(request.param)
    model, media = vision_model(request.param, folder), MediaFolder(folder / "media")
    processor = load_picture_processor(str(folder), media)
    assert processor is not None
    shown = [picture(*size) for size in SIZES] + [picture(24, 24, color=(0, 0, 250))]
    return World(model, folder, processor, tuple(media.write(part).sha256 for part in shown))


def params(seed: int, media: tuple[str, ...], *, trajectory: str = "", count: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.8, seed=seed, media=media, trajectory=trajectory)


def sampled(sampler: TransformersSampler, *requests: tuple[tuple[int, ...], SamplingParams]) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*(sampler.sample(ids, each) for ids, each in requests))

    return asyncio.run(all_of_them())


def test_logprobs_are_those_of_the_plain_model_and_no_reply_depends_on_its_company(world: World) -> None:
    prompts = [world.prompt(4, 5, -1, 6), world.prompt(7, 8, 9), world.prompt(4, -3, 5, -2, 9, -4, 6)]
    requests = [(ids, params(seed, media)) for seed, (ids, media) in enumerate(prompts)]
    sampler = world.sampler()
    together = sampled(sampler, *requests)
    for (ids, media), generation in zip(prompts, together, strict=True):
        expected = world.plain(ids, media, generation.token_ids, 0.8)
        assert generation.logprobs == pytest.approx(expected, abs=2e-5)
    for request, generation in zip(requests, together, strict=True):
        sampler.update(world.model.state_dict().items(), 1)  # forgets keys, values and features
        assert sampled(sampler, request) == [generation]
    sampler.close()


def test_after_an_update_of_the_tower_a_picture_that_was_seen_before_is_seen_anew(world: World) -> None:
    sampler, (ids, media) = world.sampler(), world.prompt(4, 5, -1, 6)
    sampled(sampler, (ids, params(1, media)))
    changed = deepcopy(world.model)
    towers = [weight for name, weight in changed.named_parameters() if "vis" in name]
    assert towers
    with torch.no_grad():
        for weight in towers:
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    sampler.update(changed.state_dict().items(), 1)
    (after,) = sampled(sampler, (ids, params(1, media)))
    expected = replace(world, model=changed).plain(ids, media, after.token_ids, 0.8)
    assert after.logprobs == pytest.approx(expected, abs=2e-5)
    assert expected != pytest.approx(world.plain(ids, media, after.token_ids, 0.8), abs=1e-3)
    sampler.close()


def test_the_next_turn_computes_only_what_is_new_and_sees_the_new_picture(world: World) -> None:
    sampler = world.sampler()
    ids, media = world.prompt(4, 5, -1, 6)
    (first,) = sampled(sampler, (ids, params(1, media, trajectory="a")))
    added, more = world.prompt(7, -3, 8)
    ids, media = (*ids, *first.token_ids, *added), (*media, *more)
    (second,) = sampled(sampler, (ids, params(2, media, trajectory="a")))
    assert second.logprobs == pytest.approx(world.plain(ids, media, second.token_ids, 0.8), abs=2e-5)
    (alone,) = sampled(sampler, (ids, params(2, media)))
    assert alone == second
    sampler.close()


@pytest.mark.parametrize("world", SOME, indirect=True)
def test_another_picture_behind_equal_ids_is_another_prompt(world: World) -> None:
    ids, media = world.prompt(4, -3, 5)
    others = world.prompt(4, -4, 5)
    assert others[0] == ids
    sampler = world.sampler()
    kept, other = (params(1, each, trajectory="a", count=2) for each in (media, others[1]))
    replies = [sampled(sampler, (ids, each))[0] for each in (kept, other)]
    replies += sampled(sampler, (ids, replace(kept, trajectory="b")), (ids, replace(other, trajectory="c")))
    for each, generation in zip((media, others[1]) * 2, replies, strict=True):
        assert generation.logprobs == pytest.approx(world.plain(ids, each, generation.token_ids, 0.8), abs=2e-5)
    assert replies[0].logprobs != replies[1].logprobs
    sampler.close()


@pytest.mark.parametrize("world", SOME, indirect=True)
def test_pictures_that_do_not_fit_the_prompt_are_refused(world: World) -> None:
    sampler = world.sampler()
    ids, media = world.prompt(4, -1, 6)
    with pytest.raises(SamplerError, match="placeholders"):
        sampled(sampler, (ids, params(1, (media[0], world.pictures[1]))))
    with pytest.raises(SamplerError, match="No such file"):
        sampled(sampler, (ids, params(1, ("f" * 64,))))
    assert sampled(sampler, (ids, params(1, media)))[0].token_ids
    sampler.close()


@pytest.mark.parametrize("world", SOME, indirect=True)
def test_text_alone_needs_no_media(world: World) -> None:
    sampler = TransformersSampler(str(world.folder), device="cpu")
    ids, _ = world.prompt(4, 5, 6, 7)
    (generation,) = sampled(sampler, (ids, params(3, ())))
    assert generation.logprobs == pytest.approx(world.plain(ids, (), generation.token_ids, 0.8), abs=2e-5)
    with pytest.raises(SamplerError, match="the sampler was given no folder of media"):
        sampled(sampler, (ids, params(3, (world.pictures[0],))))
    sampler.close()


def test_a_text_model_refuses_pictures(tmp_path: Path) -> None:
    from tiny import qwen3, tokenizer

    qwen3().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    sampler = TransformersSampler(str(tmp_path), device="cpu", media=MediaFolder(tmp_path / "media"))
    with pytest.raises(SamplerError, match="models of type 'qwen3' are not shown any"):
        sampled(sampler, ((1, 2), params(1, ("f" * 64,))))
    sampler.close()


def test_attention_to_pictures_is_that_of_output_attentions_and_the_sampler_goes_on(world: World) -> None:
    (ids, media), (text, _) = world.prompt(4, -1, 6, -3, 7), world.prompt(4, 5, 6)
    question, calibration, place = (8, 9), (10,), len(ids) - 1
    one = AttentionQuery(
        prompt_ids=ids,
        positions=(place,),
        question_ids=question,
        calibration_ids=calibration,
        layers=(0, 1),
        media=media,
    )
    other = replace(one, prompt_ids=text, positions=(2,), media=())
    sampler = world.sampler()
    request = (ids, params(1, media))
    before = sampled(sampler, request)

    async def attended() -> list[TokenAttention]:
        return await asyncio.gather(sampler.attend(one), sampler.attend(other))

    for query, found in zip((one, other), asyncio.run(attended()), strict=True):
        asked = world.attention((*query.prompt_ids, *question), query.media)
        end = len(query.prompt_ids)
        expected = (asked[query.positions[0]] + asked[end:].mean(dim=0)) / 2
        assert found.question == pytest.approx(expected[:end].tolist(), abs=1e-5)
        blank = world.attention((*query.prompt_ids, *calibration), query.media)[end:].mean(dim=0)
        assert found.calibration == pytest.approx(blank[:end].tolist(), abs=1e-5)
    assert sampled(sampler, request) == before
    sampler.close()


@pytest.mark.parametrize("world", SOME, indirect=True)
def test_a_unit_is_scored_by_the_patches_of_its_picture(world: World) -> None:
    def shown(turn: int, number: int) -> Unit:
        part = MediaPart(sha256=world.pictures[number], type="image/png")
        seen = Message(role="user", content=(TextPart(text="look "), part))
        return Unit(turn=turn, reply=Message(role="assistant", content="say"), results=(seen,))

    sampler = world.sampler()
    renderer = Renderer(load_tokenizer(str(world.folder)), pictures=world.processor)

    def scores(*numbers: int, tokens: int = 1000) -> Sequence[float]:
        units = tuple(shown(turn, number) for turn, number in enumerate(numbers))
        past = History(pinned=(Message(role="user", content="what is there ?"),), units=units)
        return asyncio.run(AttentionScorer(sampler, renderer, layers=(0, 1)).score([past], tokens))[0]

    found, other = scores(0, 2, 0), scores(0, 3, 0)  # another picture behind equal ids
    assert len(found) == 3
    assert found[1] != other[1]
    in_pages = scores(0, 2, 0, tokens=60)
    assert [score > 0 for score in in_pages] == [True, True, False]
    sampler.close()


@pytest.mark.parametrize("world", SOME, indirect=True)
def test_pictures_are_no_part_of_the_question(world: World) -> None:
    picture = MediaPart(sha256=world.pictures[0], type="image/png")
    asked = Message(role="user", content=(TextPart(text="what is there ?"), picture))
    alone = Message(role="user", content=(picture,))
    units = tuple(Unit(turn=turn, reply=Message(role="assistant", content="say"), results=()) for turn in range(2))
    sampler = world.sampler()
    renderer = Renderer(load_tokenizer(str(world.folder)), pictures=world.processor)

    queries = list[AttentionQuery]()

    class Recording:
        version = 0

        async def attend(self, query: AttentionQuery) -> TokenAttention:
            queries.append(query)
            return await sampler.attend(query)

    for pinned in ((asked,), (asked, alone)):
        asyncio.run(AttentionScorer(Recording(), renderer).score([History(pinned=pinned, units=units)], 1000))
    assert [renderer.text(query.question_ids) for query in queries] == ["what is there ?"] * 2
    sampler.close()
