"""The built wheel: what an installed WitCert has, and what it has not."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("witcert", "witcert_conformance", "witcert_kernels", "witcert_ref")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return BytesParser().parsebytes(wheel.read(name))


def test_the_wheel_has_the_four_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_whole_and_typed(wheel: zipfile.ZipFile, package: str) -> None:
    source = ROOT / "conformance" if package == "witcert_conformance" else ROOT
    files = {str(path.relative_to(source)) for path in (source / package).rglob("*.py")}
    assert files <= set(wheel.namelist())
    assert f"{package}/py.typed" in wheel.namelist()


@pytest.mark.parametrize(
    "pattern",
    ["haystack.txt", "calibration.txt", "*.safetensors", "report.html*"],
    ids=["haystack", "calibration text", "default calibration", "report template"],
)
def test_the_data_ships(wheel: zipfile.ZipFile, pattern: str) -> None:
    shipped = [name for name in wheel.namelist() if Path(name).match(f"witcert/data/{pattern}")]
    assert shipped
    for name in shipped:
        assert wheel.read(name) == (ROOT / name).read_bytes()


def test_the_spec_is_the_one_that_lean_exported(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("witcert_ref/spec.json") == (ROOT / "formal" / "spec.json").read_bytes()


def test_the_licence_and_notice_ship(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    for name in ("LICENSE", "NOTICE"):
        [shipped] = [path for path in wheel.namelist() if path.endswith(f".dist-info/licenses/{name}")]
        assert wheel.read(shipped) == (ROOT / name).read_bytes()


def test_every_requirement_has_a_lower_bound_and_the_tested_ranges_an_upper_one(metadata: Message) -> None:
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        operators = {specifier.operator for specifier in requirement.specifier}
        if requirement.name == "witcert":
            continue
        assert ">=" in operators, line
        if requirement.name in ("torch", "transformers"):
            assert "<" in operators, line


def test_the_constraints_lie_in_the_tested_ranges(metadata: Message) -> None:
    wanted = {(r := Requirement(line)).name: r.specifier for line in metadata.get_all("Requires-Dist", [])}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {pin.name for pin in pinned} >= {"torch", "transformers"}
    for pin in pinned:
        [specifier] = pin.specifier
        assert specifier.operator == "==" and specifier.version in wanted[pin.name], pin


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    assert "witcert = witcert.cli:main" in wheel.read(name).decode()
