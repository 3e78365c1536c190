"""`motley serve --simulate`: what does not go together or is not known is told before anything starts."""

import pytest

from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.service.startup.serve_command import _check_simulated
from motley.cluster.service_errors import ConfigurationError
from motley.replicas.errors import InvalidRequest


def test_known_names_pass():
    _check_simulated(ServeOptions())
    _check_simulated(ServeOptions(simulate="P40"))
    _check_simulated(ServeOptions(simulate="NVIDIA H100 80GB HBM3", simulate_model="qwen2.5-7b"))


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"simulate": "Voodoo 2"}, InvalidRequest, "Tesla P40"),
        ({"simulate": "P40", "simulate_model": "gpt-2"}, InvalidRequest, "expected one of qwen"),
        ({"simulate_model": "qwen2.5-7b"}, ConfigurationError, "--simulate"),
        ({"simulate": "P40", "null_engine": True}, ConfigurationError, "only one of them"),
    ],
)
def test_others_are_refused(options, error, told):
    with pytest.raises(error, match=told):
        _check_simulated(ServeOptions(**options))
