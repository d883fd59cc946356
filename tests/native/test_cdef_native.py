"""
The built extension: every name resolves, every struct can be made, every constant is C's.

A wrong function signature fails in the C compiler; a wrong field type compiles and fails
only when the struct is first used. So every struct is used here.
"""

from typing import Any

import pytest

from pyllama_raw import _ffi
from pyllama_raw._ffi.cdef import SHIM
from scripts.c_declarations import parse
from scripts.c_stub import Writer
from scripts.sync_cdef import declared, merge

pytestmark = pytest.mark.native

DECLARED = merge(iter((declared(), parse(SHIM))))
ENUMERATORS = [name for values in DECLARED.enums.values() for name in values]


@pytest.fixture(scope="module")
def ffi() -> Any:
    return _ffi.load()[0]


@pytest.fixture(scope="module")
def lib() -> Any:
    return _ffi.load()[1]


def test_lib_has_exactly_what_is_declared(lib: Any):
    """
    Each declared function, constant and enumerator is there, and nothing besides.
    """
    names = {*DECLARED.functions, *DECLARED.constants, *ENUMERATORS}

    found = {name for name in dir(lib) if getattr(lib, name) is not None}

    assert found == names


def test_constants_and_enumerators_are_numbers(ffi: Any, lib: Any):
    """
    The compiler filled in a number for each `...`, the same by name and by enum.
    """
    by_enum = {
        name: value
        for enum in DECLARED.enums
        for name, value in ffi.typeof(f"enum {enum}").relements.items()
    }

    assert by_enum == {name: getattr(lib, name) for name in ENUMERATORS}
    assert all(isinstance(getattr(lib, name), int) for name in DECLARED.constants)


@pytest.mark.parametrize("tag", DECLARED.structs)
def test_struct_can_be_made_and_read(ffi: Any, tag: str):
    """
    The declared field types fit the C layout; a new struct is zero in every field.
    """
    names = [
        name
        for text in DECLARED.structs[tag]
        for name, _ in Writer(DECLARED).members(text)
    ]
    made = ffi.new(f"struct {tag} *")

    values = [getattr(made, name) for name in names]

    assert [name for name, _ in ffi.typeof(made).item.fields if name] == names
    assert len(values) == len(names)
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
