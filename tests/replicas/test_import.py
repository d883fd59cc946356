"""What imports what."""

import subprocess
import sys


def test_the_package_imports_neither_replicas_nor_ray():
    """
    Ray is large, and few need it.
    """
    code = "import sys, pyllama_raw, pyllama_raw.serve; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert not {"ray", "pyllama_raw.replicas"} & {*done.stdout.split()}
