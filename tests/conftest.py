import os
import subprocess
import sys

import pytest


@pytest.fixture
def pass_in_interpreter():
    """Run tests of a file in Triton's CPU interpreter, in a process of its own, as TRITON_INTERPRET must be set before the import;
    none may fail or be skipped."""
    def run(file, select):
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", os.path.abspath(file), "-k", select]
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=os.path.dirname(os.path.dirname(os.path.abspath(file))), env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "passed" in result.stdout and "skipped" not in result.stdout, result.stdout
    return run
