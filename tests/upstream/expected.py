"""What each entry of the catalogue must say of the oldest and of the newest set of packages.

A row is (oldest, newest). "or" between states means that the machine decides; a comment says by what.
"""

from __future__ import annotations

from collections.abc import Mapping

SETS: Mapping[str, Mapping[str, str]] = {
    "oldest": {"transformers": "5.6.2", "accelerate": "1.13.0", "peft": "0.19.1", "bitsandbytes": "0.49.2"},
    "newest": {"transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2", "bitsandbytes": "0.50.2"},
}
P, F, N = "present", "fixed", "not applicable"

EXPECTED_A_TO_B: dict[str, tuple[str, str]] = {
    "A1": (P, P),
    "A2": (P, P),
    "A3": (P, F),
    "A4": (P, P),
    "A5": (P, P),
    "A6": (P, P),
    "A7": (P, F),
    "A8": (f"{P} or {N}", f"{P} or {N}"),  # not applicable on CPUs without AVX512-BF16
    "A9": (f"{P} or {N}", f"{P} or {N}"),
    "B1": (P, P),
    "B2": (P, P),
    "B3": (P, P),
    "B4": (P, F),
    "B5": (P, P),
    "B6": (N, P),  # in the oldest set B5 ends the load before
    "B7": (P, P),
    "B8": (P, P),
    "B9": (P, P),
}

EXPECTED_C_TO_H: dict[str, tuple[str, str]] = {
    "C1": (P, P),
    "C2": (P, P),
    "C3": (P, P),
    "C4": (P, P),
    "C5": (P, P),
    "C6": (P, P),
    "C7": (P, P),
    "C8": (P, P),
    "D1": (P, P),
    "D2": (P, F),
    "D3": (F, P),
    "D4": (P, P),
    "D5": (f"{N} or {P} or {F}", f"{N} or {P} or {F}"),  # only a GPU shows it
    "D6": (P, P),
    "E1": (P, P),
    "E2": (P, P),
    "E3": (P, P),
    "E4": (f"{N} or unknown", f"{N} or unknown"),  # unknown where vllm is installed
    "F1": (P, P),
    "F2": (P, P),
    "F3": (f"{N} or {P}", f"{N} or {P}"),  # present where one of the other quantizers is installed
    "F4": (P, P),
    "F5": (P, P),
    "G1": (P, P),
    "G2": (f"{N} or {P}", f"{N} or {P}"),  # present on Windows
    "H1": (P, F),
    "H2": (F, P),
    "H3": (P, P),
    "H4": (P, P),
    "H5": (P, P),
    "H6": (P, P),
    "I1": (P, F),
    "I2": (P, F),
    "I3": (P, P),
    "I4": (P, P),
    "I5": (P, F),
    "I6": (P, P),
    "I7": (F, P),
    "I8": (F, f"{N} or {P}"),  # present on Apple GPUs
    "I9": (f"{P} or {N}", f"{P} or {N}"),  # not applicable where torchvision is installed
    "I10": (P, P),
    "I11": (P, F),
    "I12": (N, f"{N} or {P}"),  # only a GPU of compute capability 9.0 or 10.x shows it
    "I13": (N, f"{N} or {P}"),  # only a GPU shows it
    "I15": (N, f"{N} or {P} or {F}"),  # only a GPU shows it
    "I17": (N, f"{N} or {P} or {F}"),  # only a GPU shows it
    "I14": (f"{N} or {P}", f"{N} or {P}"),  # only a CPU with AVX512-BF16 shows it
    "I16": (f"{N} or {P}", f"{N} or {P}"),  # only a CPU with AVX512 shows it
    "I18": (N, P),
    "I19": (N, P),
    "I20": (N, P),
    "I21": (N, P),
    "I22": (f"{P} or {N}", P),  # read for the oldest set, not run
    "I23": (N, P),
    "I24": (f"{P} or {N} or {F}", P),  # not run for the oldest set
    "I25": (f"{N} or {P}", f"{N} or {P}"),  # only with compressed-tensors
}

EXPECTED = EXPECTED_A_TO_B | EXPECTED_C_TO_H


def set_of(versions: Mapping[str, str | None]) -> str | None:
    """Return the name of the set that these versions are, None if they are neither."""
    return next((name for name, wanted in SETS.items() if dict(versions) == dict(wanted)), None)


def expected_states(bug_id: str, set_name: str) -> tuple[str, ...]:
    """Return the states that an entry may have in a set."""
    return tuple(EXPECTED[bug_id][tuple(SETS).index(set_name)].split(" or "))
