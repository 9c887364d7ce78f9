"""Models that hear, with their language part on a ring: loss and every gradient, the towers' too, as on one process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING

from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.sound.model import EXACT, Sounds, SoundTokens, _features, make_sound_hook
from ds_ring.errors import RingConfigError
from ds_ring.schedule.layout import make_layout
from ds_ring_launcher.check.model_check import CheckRequest, ModelReport
from tests.dist.deepspeed_ranks import GENERATION, json_config, start_engine
from tests.dist.harness import Pool, catch_refusal
from tests.dist.test_families import checked

HEAD = "seq2seq-lm"


@pytest.mark.night
@pytest.mark.parametrize("family", [family for family in EXACT if family in CONFIG_MAPPING])
def test_sound_is_exact(rank_pool: Pool, family: str) -> None:
    request = CheckRequest(family, head=HEAD, forms=("plain", "padded"))
    for report in rank_pool(2).run(checked, request)[0]:
        assert report.result == "exact", (report.form, report.reason)


@pytest.mark.night
@pytest.mark.parametrize(
    ("ranks", "requested"),
    [
        (3, {"forms": ("packed",)}),
        (4, {"tokens": 75, "section": {"pattern": {"causal": True}, "ulysses_size": 2}}),
        (2, {"stage": 3, "section": {"pattern": {"causal": True}, "layout": "striped"}}),
    ],
)
def test_documents_ulysses_and_zero_3_with_sound_are_exact(
    rank_pool: Pool, ranks: int, requested: dict[str, Any]
) -> None:
    reports = rank_pool(ranks).run(checked, CheckRequest("audioflamingo3", head=HEAD, **requested))[0]
    assert [report.result for report in reports] == ["exact"], reports[0].reason


def with_numbers_of_each_rank(rank: int, world_size: int) -> list[ModelReport]:
    """Number the sound tokens of each rank from 1 on."""
    take = Sounds.take_columns

    def careless(self: Sounds, *args: Any) -> SoundTokens | None:
        outcome = take(self, *args)
        if outcome is None:
            return None
        mine = outcome.local.places_BS > 0
        numbers = mine.flatten().cumsum(0).view(mine.shape) * mine
        return outcome._replace(local=outcome.local._replace(places_BS=numbers))

    with mock.patch.object(Sounds, "take_columns", careless):
        return checked(rank, world_size, CheckRequest("qwen2_audio", head=HEAD))


@pytest.mark.night
def test_features_of_other_tokens_are_found(rank_pool: Pool) -> None:
    (report,) = rank_pool(2).run(with_numbers_of_each_rank)[0]
    assert report.result == "WRONG" and report.differences


def generated(rank: int, world_size: int) -> tuple[bool, str]:
    """A generation with sounds and one without a ring; then sounds that are too few."""
    from ds_ring_launcher.check.small_model import build, make_batch, read_config, shrink
    from ds_ring_launcher.check.small_sounds import add_sounds

    config = shrink(read_config("qwen2_audio"), 61, sounds=True)
    model, plain = build(config, HEAD, 0), build(copy.deepcopy(config), HEAD, 0).eval()
    batch = add_sounds(make_batch(config, "causal-lm", 61, 0, False), model, 0)
    labels = batch.pop("shift_labels")
    assert labels.shape == batch["input_ids"].shape
    engine = start_engine(model, json_config(world_size, 2, 0), 0.0)
    engine.eval()
    prompt = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    texts = [item.generate(**prompt, **GENERATION) for item in (engine.module, plain)]
    fewer = {key: batch[key][:2] for key in ("input_features", "feature_attention_mask")}
    return torch.equal(*texts), catch_refusal(engine, **engine.ring.shard_batch(batch | fewer))


@pytest.mark.night
def test_generation_and_refusals(rank_pool: Pool) -> None:
    for same, heard in rank_pool(2).run(generated):
        assert same
        assert heard.startswith("RingShapeError") and "expected 13 sound tokens, got 20" in heard


@pytest.mark.parametrize("family", ["musicflamingo", "qwen2_audio"])
def test_the_text_part_gets_the_embeddings_of_the_plain_model(family: str) -> None:
    from ds_ring_launcher.check.small_model import build, make_batch, read_config, shrink
    from ds_ring_launcher.check.small_sounds import add_sounds

    model = build(shrink(read_config(family), 61, sounds=True), HEAD, 0).eval()
    batch = add_sounds(make_batch(model.config, "causal-lm", 61, 0, False), model, 0)
    current, mesh = SimpleNamespace(whole=None), RingMesh.single()
    session: Any = SimpleNamespace(needs=SimpleNamespace(), batches=SimpleNamespace(current=current))
    seen: list[torch.Tensor] = []

    def see(_: Any, args: Any, inputs: dict[str, Any]) -> None:
        seen.append(inputs["inputs_embeds"])

    model.base_model.language_model.register_forward_pre_hook(see, with_kwargs=True)
    inputs = {key: x for key, x in batch.items() if key != "shift_labels"}
    model(**inputs)
    hook = make_sound_hook(model, session)
    layout = make_layout("contiguous", tokens=61, ring_size=1)
    current.whole = session.needs.whole.make_prompt_features(inputs, layout, mesh)
    _, ours = hook(model.base_model, (), inputs)
    assert current.whole.local.places_BS.any() and torch.equal(ours["inputs_embeds"], seen[0])


def test_a_tower_with_noise_of_its_own_is_refused() -> None:
    tower = SimpleNamespace(vae_std=0.6)
    config = SimpleNamespace(model_type="vibevoice_asr", acoustic_tokenizer_encoder_config=tower)
    with pytest.raises(RingConfigError, match=r"set config.acoustic_tokenizer_encoder_config.vae_std to 0"):
        _features(SimpleNamespace(config=config), {}, torch.zeros(1, 1))


def test_tokens_of_a_prompt_are_numbered_over_all_samples() -> None:
    ids = torch.tensor([[5, 9, 9, 5], [9, 5, 5, 9]])
    layout, sounds = make_layout("contiguous", tokens=4, ring_size=1), Sounds({"sound": 9})
    assert sounds.make_prompt_features({"input_ids": ids}, layout, RingMesh.single()) is None
    outcome = sounds.make_prompt_features({"input_ids": ids, "input_values": ids}, layout, RingMesh.single())
    assert outcome is not None and outcome.local.tokens == 4
    assert outcome.local.places_BS.tolist() == [[0, 1, 2, 0], [3, 0, 0, 4]]
