"""From each statement to what the project makes of it: reference functions, kernels, conformance properties."""

import ast
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path

from witcert.spec.guard import AXIOMS
from witcert_ref.spec import Theorem, claims, load

_CODES = ("abs_code_le", "abs_dequantize_sub_le", "abs_residual_le")
_LOGITS = (
    *("abs_corrected_error_le", "abs_logit_error_le", "abs_logit_error_le_half_step"),
    *("abs_scale_sum_le_half_step", "tierB_all_tokens", "tierB_token"),
)
_METER = (
    *("expVar_eq", "meter_le_eform", "min_one_sharp_mono", "phi_mono", "tv_softmax_le_meter", "tv_tilt_le_eform"),
    *("tv_tilt_le_meter", "tv_tilt_le_phi", "tv_tilt_le_sharp", "tv_tilt_le_tanh"),
)

_INSTANTIATED_BY = {
    "witcert.gate.over": ("any_of_group",),
    "witcert_kernels.budget.Budget": ("deltaLocal_budget", "request_budget", "request_budget_frac"),
    "witcert_kernels.fused.meter_of": (*_METER, "tv_softmax_le_meter_of_rounding"),
    "witcert_kernels.fused.prepare": _LOGITS,
    "witcert_kernels.fused.value_error_of": ("abs_add_le_of_rounding", "output_error_le", "output_rounding_le"),
    "witcert_kernels.fused_writer.quantize": _CODES,
    "witcert_kernels.layout.bands": ("bandNorm_rope",),
    "witcert_kernels.ops.certified_decode": (
        *("halfStep_certificate", "read_certificate", "sketch_certificate"),
        *("tierA_certificate", "tierB_certificate", "tierB_sketch_certificate"),
    ),
    "witcert_kernels.philox.dither": ("mgf_residual", "sum_residual_eq_progression"),
    "witcert_kernels.reader.ObservatoryReader.tile": (
        *("abs_corrected_error_le", "abs_logit_error_le", "tv_softmax_le_known_add_meter"),
    ),
    "witcert_kernels.reader.PackedReader.tile": _LOGITS,
    "witcert_kernels.reader.exact_tile": ("tv_tilt_eq_zero_of_all_repaired", "tv_tilt_le_meter_of_repaired"),
    "witcert_kernels.reader.softcap": ("abs_softcap_sub_le",),
    "witcert_kernels.rounding": ("flSum_div_le_sum", "sum_le_flSum_div"),
    "witcert_kernels.state.Moments.meter": _METER,
    "witcert_kernels.state.finish": (
        *("abs_add_le_of_rounding", "output_error_le", "output_rounding_le", "tv_softmax_le_known_add_meter"),
        *("tv_softmax_le_meter_of_rounding", "tv_tilt_le_relative_deviation"),
    ),
    "witcert_kernels.state.merge": ("merge_splits",),
    "witcert_kernels.triton_writer.write_packed": _CODES,
    "witcert_kernels.writer.write_packed": _CODES,
}

KERNELS: dict[str, tuple[str, ...]] = {}
"""Theorem -> the fast functions that instantiate it."""
for _function, _theorems in _INSTANTIATED_BY.items():
    for _theorem in _theorems:
        KERNELS[f"WitCert.{_theorem}"] = (*KERNELS.get(f"WitCert.{_theorem}", ()), _function)

PROOF_ONLY: dict[str, str] = {
    "WitCert.page_drop_not_exact": "Says what may not be done: after a repair the meter is evaluated anew.",
    "WitCert.rigidity": "A limit of static linear compression; there is nothing to evaluate.",
    "WitCert.sinh_le_mul_exp": "A step of a proof: the radius follows from its discrete form, `mgf_residual`.",
    "WitCert.sum_blockwise": "An identity that lets a kernel add page by page; the reference adds token by token.",
    "WitCert.sum_le_flSum_div": "About a kernel's floating-point sums; the reference's exact form has none.",
}
"""Core theorem that no function implements -> the reason."""

REFERENCE_ONLY: dict[str, str] = {
    "WitCert.tv_evict": "About eviction, which no store of ours does.",
    "WitCert.tv_tilt_le_rc_tanh": "The shape of another method, for comparison; no implementation reports it.",
    "WitCert.tv_tilt_le_twosided": "For comparison; the meter takes its place in every implementation.",
}
"""Core theorem that a reference function implements and no implementation can be asked for -> the reason."""


@dataclass(frozen=True)
class Row:
    """One statement and its links."""

    theorem: Theorem
    functions: tuple[str, ...]
    kernels: tuple[str, ...]
    properties: tuple[str, ...]

    @property
    def status(self) -> str:
        return "pending" if self.theorem.pending else "proved"

    @property
    def meaning(self) -> str:
        """The docstring on one line, or the statement where there is none."""
        return " ".join((self.theorem.doc or self.theorem.statement).split())

    @property
    def axioms(self) -> str:
        """`standard` for Lean's three or fewer, else the list."""
        if self.theorem.pending:
            return "-"
        return "standard" if set(self.theorem.axioms) <= AXIOMS else ", ".join(self.theorem.axioms)


def properties() -> dict[str, tuple[str, ...]]:
    """Theorem -> conformance properties that name it; empty where the suite is not installed."""
    try:
        registry = importlib.import_module("witcert_conformance.registry").properties()
    except ModuleNotFoundError as error:
        if error.name not in ("witcert_conformance", "witcert_conformance.registry"):
            raise
        return {}
    found: dict[str, list[str]] = {}
    for name in sorted(registry):
        for theorem in registry[name].theorems:
            found.setdefault(theorem, []).append(name)
    return {theorem: tuple(names) for theorem, names in found.items()}


@functools.cache
def rows() -> tuple[Row, ...]:
    """All statements: those with a paper number, the other proved ones, the pending ones; each group by name."""
    spec, functions, suite = load(), claims(), properties()
    every = [*spec.theorems.values(), *spec.pending.values()]
    every.sort(key=lambda t: (t.pending, not t.core, t.name))
    return tuple(
        Row(t, tuple(sorted(functions.get(t.name, ()))), KERNELS.get(t.name, ()), suite.get(t.name, ())) for t in every
    )


def unknown() -> list[str]:
    """Names that kernels, properties and the tables of reasons cite, and that are not a statement."""
    spec = load()
    cited = {*KERNELS, *PROOF_ONLY, *REFERENCE_ONLY, *properties()}
    return sorted(cited - spec.theorems.keys() - spec.pending.keys())


def defined(qualified: str, root: Path) -> bool:
    """Whether a module, or a function or class in it, or a method, is there in the sources below `root`."""
    parts = qualified.split(".")
    for cut in range(len(parts), 0, -1):
        file = root.joinpath(*parts[:cut]).with_suffix(".py")
        if file.is_file():
            break
    else:
        return False
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for name in parts[cut:]:
        found = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
        if not found:
            return False
        body = found[-1].body
    return True
