from __future__ import annotations

import copy
import pickle

import pytest
import torch

from h3compile.runtime.results import FrozenConfig, TransformerOutput


def test_an_output_is_read_by_attribute_name_and_position() -> None:
    video, audio = torch.zeros(1), torch.ones(1)
    output = TransformerOutput(video, audio)
    assert output.sample is output["sample"] is output[0] is video
    assert output.audio_sample is output["audio_sample"] is output[1] is audio
    assert len(output) == 2 and tuple(output) == output.to_tuple() == (video, audio)
    for key, error in ((2, IndexError), ("video", KeyError)):
        with pytest.raises(error):
            output[key]


def test_a_configuration_is_read_by_attribute_and_item_and_not_changed() -> None:
    config = FrozenConfig({"patch_size": (1, 2, 2), "hidden_size": 8})
    assert config.patch_size == config["patch_size"] == (1, 2, 2)
    assert dict(config) == {"patch_size": (1, 2, 2), "hidden_size": 8}
    assert config.get("in_channels", 3) == 3
    with pytest.raises(AttributeError, match="cannot be changed"):
        config.hidden_size = 9
    with pytest.raises(AttributeError, match="no 'in_channels'"):
        _ = config.in_channels
    assert dict(copy.deepcopy(config)) == dict(pickle.loads(pickle.dumps(config))) == dict(config)
