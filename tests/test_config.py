import dataclasses

import pytest

from torch_gpumode import config


def test_nothing_set_means_nothing_chosen():
    assert config.load({"HOME": "/", "TORCH_LOGS": "+dynamo"}) == config.Config()
    assert config.Config(cuda=None, flight_record=None, spin_us=None) == config.Config()


def test_reads_every_variable():
    environ = {
        "TORCH_GPUMODE_CUDA": "0",
        "TORCH_GPUMODE_FLIGHT_RECORD": "20",
        "TORCH_GPUMODE_SPIN_US": "150",
    }
    assert len(environ) == len(dataclasses.fields(config.Config)) <= 10
    assert config.load(environ) == config.Config(cuda=False, flight_record=20, spin_us=150)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TORCH_GPUMODE_CUDA", "yes"),
        ("TORCH_GPUMODE_CUDA", ""),
        ("TORCH_GPUMODE_FLIGHT_RECORD", "-1"),
        ("TORCH_GPUMODE_FLIGHT_RECORD", "100001"),
        ("TORCH_GPUMODE_SPIN_US", "-1"),
        ("TORCH_GPUMODE_SPIN_US", "1.5"),
        ("TORCH_GPUMODE_SPIN_US", "²"),
    ],
)
def test_a_bad_value_is_an_error_that_names_variable_and_value(name, text):
    with pytest.raises(ValueError, match=f"{name}={text!r} must be"):
        config.load({name: text})


def test_an_unknown_variable_is_an_error_that_names_the_near_match():
    with pytest.raises(
        ValueError, match=r"TORCH_GPUMODE_SPINS_US.*did you mean TORCH_GPUMODE_SPIN_US$"
    ):
        config.load({"TORCH_GPUMODE_SPINS_US": "1"})


def test_an_unknown_variable_that_resembles_none_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"^TORCH_GPUMODE_QQQQQQ .*known are .*_CUDA"):
        config.load({"TORCH_GPUMODE_QQQQQQ": "1"})


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.load({}).spin_us = 1
