"""
The built extension: every name resolves, every struct can be made, every constant is C's.

A wrong function signature fails in the C compiler; a wrong field type compiles and fails
only when the struct is first used. So every struct is used here.
"""

import re
from typing import Any

import pytest

import build_lib
from pyllama_raw import _ffi
from scripts.c_declarations import Declarations
from scripts.sync_cdef import built_include

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def declared() -> Declarations:
    include = built_include()
    if include is None:
        pytest.skip("the extension has not been built here")
    return build_lib.seen_by_python([include])


@pytest.fixture(scope="module")
def ffi() -> Any:
    return _ffi.load()[0]


@pytest.fixture(scope="module")
def lib() -> Any:
    return _ffi.load()[1]


def names(declared: Declarations, *kinds: str) -> list[str]:
    return [name for kind, name in declared if kind in kinds]


def enumerators(declared: Declarations) -> list[str]:
    return [v for (kind, _), parts in declared.items() if kind == "enum" for v in parts]


def test_lib_has_exactly_what_is_declared(declared: Declarations, lib: Any):
    """
    Each declared function, constant and enumerator is there, and nothing besides.
    """
    wanted = {*names(declared, "function", "constant"), *enumerators(declared)}

    found = {name for name in dir(lib) if getattr(lib, name) is not None}

    assert found == wanted


def test_constants_and_enumerators_are_numbers(
    declared: Declarations, ffi: Any, lib: Any
):
    """
    The compiler filled in a number for each `...`, the same by name and by enum.
    """
    by_enum = {
        name: value
        for enum in names(declared, "enum")
        for name, value in ffi.typeof(f"enum {enum}").relements.items()
    }

    assert by_enum == {name: getattr(lib, name) for name in enumerators(declared)}
    assert all(isinstance(getattr(lib, n), int) for n in names(declared, "constant"))


def test_structs_can_be_made_and_read(declared: Declarations, ffi: Any):
    """
    The declared field types fit the C layout; a new struct is zero in every field.
    """
    for tag in names(declared, "struct"):
        made = ffi.new(f"struct {tag} *")
        fields = [name for name, _ in ffi.typeof(made).item.fields if name]
        text = " ".join(declared["struct", tag])
        for name in fields:
            getattr(made, name)
            assert re.search(rf"\b{name}\b", text)

        assert len(fields) >= len(declared["struct", tag]) > 0
        assert not any(bytes(ffi.buffer(made)))


def test_structs_pass_by_value(lib: Any):
    """
    Structs declared with `...;` come back by value with what C put in.
    """
    params = lib.llama_context_default_params()

    assert (params.n_seq_max, params.type_k) == (1, lib.GGML_TYPE_F16)
    assert lib.mtmd_context_params_default().warmup is True
    assert lib.llama_sampler_chain_default_params().no_perf is True


def test_constants_have_the_values_of_c(lib: Any):
    """
    Unsigned, negative and parenthesised values arrive as they are.
    """
    assert lib.LLAMA_DEFAULT_SEED == 0xFFFFFFFF
    assert lib.LLAMA_TOKEN_NULL == -1
    assert lib.PLR_EXCEPTION == -1000
