"""The forward pass gives the same logits however the work is split, and refuses models that it cannot run."""

import json

import numpy as np
import pytest

from rollout_service.engines.kinds.embedded.model import KVStore, Qwen3
from rollout_service.engines.kinds.embedded.weights import ModelError, read_config, read_tensors
from rollout_service.testing import Shape, write_random_checkpoint

SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=300, context=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "small", SMALL)


@pytest.fixture(scope="module")
def model(folder):
    return Qwen3(folder)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, SMALL.vocab, length)


def whole(model, ids):
    return model.forward(ids[None], np.arange(len(ids))[None], KVStore(model.config, 1), 0)[0]


@pytest.mark.parametrize("cut", [1, 5, 19])
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(model, cut):
    ids, store = prompt(20), KVStore(model.config, 1)
    model.forward(ids[None, :cut], np.arange(cut)[None], store, 0)
    logits = model.forward(ids[None, cut:], np.arange(cut, 20)[None], store, 0)[0]
    np.testing.assert_allclose(logits, whole(model, ids), atol=1e-4)


def test_sequences_of_different_lengths_in_a_batch_do_not_touch_each_other(model):
    sequences = [prompt(length, seed=length) for length in (3, 40, 17)]
    store = KVStore(model.config, 4)
    for slot, ids in enumerate(sequences, start=1):
        model.forward(ids[None, :-1], np.arange(len(ids) - 1)[None], store, slot)
    last = np.array([[ids[-1]] for ids in sequences])
    positions = np.array([[len(ids) - 1] for ids in sequences])
    logits = model.forward(last, positions, store, 1)
    for row, ids in enumerate(sequences):
        np.testing.assert_allclose(logits[row], whole(model, ids), atol=1e-4)


def test_earlier_content_of_a_slot_does_not_show(model):
    store = KVStore(model.config, 1)
    model.forward(prompt(50, seed=9)[None], np.arange(50)[None], store, 0)
    ids = prompt(10)
    np.testing.assert_allclose(model.forward(ids[None], np.arange(10)[None], store, 0)[0], whole(model, ids), atol=1e-5)


def test_kv_can_be_moved_and_copied_out_and_in_while_the_store_grows(model):
    ids, store = prompt(30), KVStore(model.config, 3, capacity=8)
    model.forward(ids[None, :-1], np.arange(29)[None], store, 0)
    store.move(0, 2, 29)
    keys, values = store.read(2, 0, 29)
    store.write(1, 0, keys, values)
    for slot in (1, 2):
        logits = model.forward(ids[None, -1:], np.array([[29]]), store, slot)[0]
        np.testing.assert_allclose(logits, whole(model, ids), atol=1e-4)


def test_the_store_grows_up_to_the_context(model):
    ids = prompt(SMALL.context)
    store = KVStore(model.config, 1, capacity=64)
    logits = model.forward(ids[None], np.arange(SMALL.context)[None], store, 0)
    assert np.isfinite(logits).all()
    assert store.keys.shape[3] == SMALL.context


@pytest.mark.parametrize(("dtype", "tolerance"), [("F32", 0.0), ("F16", 2e-3), ("BF16", 1e-2)])
def test_every_dtype_is_read(tmp_path, dtype, tolerance):
    exact = read_tensors(write_random_checkpoint(tmp_path / "exact", SMALL, dtype="F32"))
    read = read_tensors(write_random_checkpoint(tmp_path / "other", SMALL, dtype=dtype))
    assert read.keys() == exact.keys()
    for name, tensor in exact.items():
        assert read[name].dtype == np.float32
        np.testing.assert_allclose(read[name], tensor, rtol=tolerance, atol=tolerance / 10)


def test_an_untied_head_is_used(tmp_path):
    shape = Shape(**{**{name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}, "tied": False})
    untied = Qwen3(write_random_checkpoint(tmp_path / "untied", shape))
    assert not untied.config.tied_embeddings
    assert np.isfinite(whole(untied, prompt(5))).all()


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 3}, "no tensor"),
    ],
)
def test_a_model_that_this_engine_cannot_run_is_refused_by_name(tmp_path, changes, message):
    folder = write_random_checkpoint(tmp_path / "model", SMALL)
    rewrite(folder, **changes)
    with pytest.raises(ModelError, match=message):
        Qwen3(folder)


def test_older_configs_name_the_rope_base_at_the_top(tmp_path):
    folder = write_random_checkpoint(tmp_path / "model", SMALL)
    rewrite(folder, rope_parameters=None, rope_theta=5e5)
    assert read_config(folder).rope_theta == 5e5


def test_a_field_that_is_missing_is_named(tmp_path):
    folder = write_random_checkpoint(tmp_path / "model", SMALL)
    config = json.loads((folder / "config.json").read_text())
    del config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="rms_norm_eps"):
        read_config(folder)


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x05\x00\x00\x00\x00\x00\x00\x00{nope", b"\xff" * 100])
def test_broken_weights_are_refused(tmp_path, content):
    folder = write_random_checkpoint(tmp_path / "model", SMALL)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="safetensors"):
        Qwen3(folder)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        Qwen3(tmp_path)
