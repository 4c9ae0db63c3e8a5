"""The dynamic loss scale: when it is halved and when it is doubled."""

from hal.model.training.loss_scaler import LossScaler


def test_the_loss_scale_halves_after_hysteresis_and_doubles_after_the_window():
    scaler = LossScaler(64.0, True, minimum=16.0, window=3, hysteresis=2, hysteresis_left=2)
    scales = []
    for overflow in [1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0]:
        scaler.update(bool(overflow))
        scales.append(scaler.scale)
    # The first halving takes two overflows, others one, never below 16; three good steps double and reset hysteresis.
    assert scales == [64, 32, 16, 16, 16, 16, 32, 32, 32, 32, 64]
