from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npubundle.errors import ExitCode
from npurt import DataError, DivergedError, MismatchError, Pack, TrainConfig, Trainer, UsageError
from npurt import checkpoint as checkpoints
from tests.npurt.simulator import Simulator, random_pack

CONFIG = TrainConfig(steps=6, lr=0.05, accum=2, warmup=1)


def one_pack(first: Pack, second: Pack) -> Pack:
    """Two short packs as one; documents of the simulator do not see each other anyway."""
    joined = {}
    for name in ("tokens", "positions", "segments", "labels"):
        joined[name] = np.concatenate([getattr(first, name)[:8], getattr(second, name)[:8]])
    return Pack(**joined)


def state_of(simulator: Simulator) -> dict[str, bytes]:
    return {name: simulator.read(name).tobytes() for name in ("lora", "moment1", "moment2")}


def test_fit_reports_every_step_and_learns(trainer: Trainer, rows: Path) -> None:
    reports = list(trainer.fit(rows))
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert all(report.grad_norm > 0 for report in reports)
    assert trainer.tokens == sum(report.tokens for report in reports)
    assert trainer.supervised_tokens == sum(report.supervised_tokens for report in reports) > 0
    assert [report.lr for report in reports] == [trainer.config.learning_rates(6).rate(step) for step in range(1, 7)]


def test_loss_is_the_mean_over_supervised_tokens(trainer: Trainer) -> None:
    packs = [random_pack(1), random_pack(2, supervised=3)]
    expected = -np.concatenate([trainer.logprobs(pack)[pack.labels != -100] for pack in packs])
    report = trainer.train_step(packs, lr=0.01)
    assert report.supervised_tokens == 18
    assert report.tokens == 32
    assert report.loss == pytest.approx(expected.mean(), rel=1e-6)
    assert report.tokens_per_s == pytest.approx(report.tokens / report.seconds)


def test_accumulated_equals_one_large_batch(simulated_model: Path) -> None:
    first, second = random_pack(1, length=8), random_pack(2, length=8, supervised=2)
    results = []
    for packs in ([first, second], [one_pack(first, second)]):
        with Trainer.on(Simulator(), simulated_model, CONFIG) as trainer:
            reports = [trainer.train_step(packs) for _ in range(5)]
            results.append((reports, trainer.parameters()))
    (in_two, their), (in_one, own) = results
    for accumulated, large in zip(in_two, in_one, strict=True):
        assert accumulated.loss == pytest.approx(large.loss, rel=1e-6)
        assert accumulated.grad_norm == pytest.approx(large.grad_norm, rel=1e-5)
    for name, values in their.items():
        np.testing.assert_allclose(values, own[name], atol=2e-5)


def test_update_is_adamw_of_torch(simulated_model: Path) -> None:
    torch = pytest.importorskip("torch")
    config = TrainConfig(steps=20, lr=0.05, weight_decay=0.1, beta1=0.8, beta2=0.95, max_norm=0.5, schedule="constant")
    simulator = Simulator()
    with Trainer.on(simulator, simulated_model, config) as trainer:
        theirs = torch.nn.Parameter(torch.from_numpy(simulator.read("lora")))
        optimizer = torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-8)
        for step in range(4):
            report = trainer.train_step([random_pack(step)])
            theirs.grad = torch.from_numpy(simulator.read("grad") / report.supervised_tokens)
            assert float(torch.nn.utils.clip_grad_norm_([theirs], 0.5)) == pytest.approx(report.grad_norm, rel=1e-5)
            optimizer.param_groups[0]["lr"] = report.lr
            optimizer.step()
            np.testing.assert_allclose(simulator.read("lora"), theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_no_clipping_with_zero(simulated_model: Path) -> None:
    simulator = Simulator()
    with Trainer.on(simulator, simulated_model, TrainConfig(steps=1, max_norm=0.0, warmup=0)) as trainer:
        trainer.train_step([random_pack(1)])
        assert simulator.read("max_norm") == np.float32(1e30)


@pytest.mark.parametrize(("poison", "said"), [("loss", "loss is nan"), ("gradient", "gradient is not finite")])
def test_divergence_stops_before_the_update(simulated_model: Path, rows: Path, poison: str, said: str) -> None:
    simulator = Simulator(poison={6: poison})  # the second micro-step of step 3
    with Trainer.on(simulator, simulated_model, CONFIG) as trainer:
        fit = trainer.fit(rows)
        assert [next(fit).step, next(fit).step] == [1, 2]
        before = state_of(simulator)
        with pytest.raises(DivergedError, match=f"step 3: the {said}") as caught:
            next(fit)
        assert caught.value.exit_code is ExitCode.DIVERGED
        assert "--lr" in str(caught.value.remedy)
        assert simulator.updates == 2
        assert state_of(simulator) == before
        assert trainer.step == 2


def test_divergence_keeps_the_last_good_state(simulated_model: Path, rows: Path, tmp_path: Path) -> None:
    simulator = Simulator(poison={7: "loss"})
    with Trainer.on(simulator, simulated_model, CONFIG) as trainer:
        with pytest.raises(DivergedError) as caught:
            list(trainer.fit(rows, save_to=tmp_path / "out"))
        kept = checkpoints.latest(tmp_path / "out")
        assert kept is not None
        assert kept.name == "checkpoint-3"
        assert str(kept) in str(caught.value.remedy)
        assert checkpoints.load(kept).arrays["lora"].tobytes() == simulator.read("lora").tobytes()


def test_state_that_is_not_finite_is_not_saved(trainer: Trainer, simulator: Simulator, tmp_path: Path) -> None:
    trainer.train_step([random_pack(1)])
    simulator.view("lora")[5] = np.nan
    for save in (trainer.save_adapter, trainer.save_checkpoint):
        with pytest.raises(DivergedError, match="not finite"):
            save(tmp_path / "out")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_nothing_supervised(trainer: Trainer) -> None:
    with pytest.raises(DataError, match="0/0"):
        trainer.train_step([random_pack(1, supervised=0)])


def test_stop_gives_up_the_step_at_hand(simulator: Simulator, trainer: Trainer, rows: Path) -> None:
    dataset = trainer.load_data(rows)
    run = simulator.run

    def run_and_stop(phase: str) -> None:
        run(phase)
        if simulator.micro_steps == 5:
            trainer.request_stop()

    simulator.run = run_and_stop  # type: ignore[method-assign]
    reports = list(trainer.fit(dataset))
    assert [report.step for report in reports] == [1, 2]
    assert trainer.stopping
    assert simulator.micro_steps == 5
    assert simulator.updates == 2
    assert dataset.state()["index"] == 4


def test_continues_from_a_checkpoint_bit_for_bit(simulated_model: Path, rows: Path, tmp_path: Path) -> None:
    config = TrainConfig(steps=9, lr=0.05, accum=3, weight_decay=0.01, seed=4)  # goes through the data several times
    whole, parts = Simulator(), Simulator()
    with Trainer.on(whole, simulated_model, config) as trainer:
        expected = [report.loss for report in trainer.fit(rows)]
        final = trainer.parameters()
    losses: list[float] = []
    for last in (4, 7, 9):
        fresh = Simulator()
        with Trainer.on(fresh, simulated_model, config) as trainer:
            if losses:
                trainer.restore(tmp_path / f"checkpoint-{len(losses)}")
                assert state_of(fresh) == state_of(parts)
            for report in trainer.fit(rows):
                losses.append(report.loss)
                if report.step == last:
                    break
            trainer.save_checkpoint(tmp_path)
            parts, found = fresh, trainer.parameters()
            assert trainer.supervised_tokens > 0
            parts.closed = False
        fresh.closed = False
    assert losses == expected
    assert all(np.array_equal(values, found[name]) for name, values in final.items())


def test_checkpoint_of_another_bundle(trainer: Trainer, simulated_model: Path, tmp_path: Path) -> None:
    saved = trainer.save_checkpoint(tmp_path)
    other = Trainer.on(Simulator(manifest_digest="sha256:" + "6" * 64), simulated_model)
    with other, pytest.raises(MismatchError, match="does not belong to this bundle"):
        other.restore(saved)


def test_resumed_data_must_be_the_same(trainer: Trainer, rows: Path, tmp_path: Path) -> None:
    next(iter(trainer.fit(rows)))
    trainer.restore(trainer.save_checkpoint(tmp_path))
    with rows.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(MismatchError, match="data position"):
        next(trainer.fit(rows))


def test_checkpoints_while_training(simulated_model: Path, rows: Path, tmp_path: Path) -> None:
    config = TrainConfig(steps=7, save_every=2, keep_checkpoints=2)
    with Trainer.on(Simulator(), simulated_model, config) as trainer:
        list(trainer.fit(rows, save_to=tmp_path / "out"))
        names = [path.name for path in checkpoints.existing(tmp_path / "out")]
        assert names == ["checkpoint-4", "checkpoint-6"]
        assert trainer.save_checkpoint(tmp_path / "out").name == "checkpoint-7"
        assert trainer.save_checkpoint(tmp_path / "out").name == "checkpoint-7"  # not twice


def test_evaluation_while_training(simulated_model: Path, rows: Path) -> None:
    with Trainer.on(Simulator(), simulated_model, TrainConfig(steps=5, eval_every=2, lr=0.05)) as trainer:
        reports = list(trainer.fit(rows, eval_data=rows))
        assert [report.step for report in reports if report.evaluation] == [2, 4, 5]
        last = reports[-1].evaluation
        assert last is not None
        assert trainer.evaluate(rows) == last
        assert last.tokens == trainer.load_data(rows).counts.supervised_tokens
        assert last.perplexity == pytest.approx(np.exp(last.loss))
        assert 0 < last.accuracy <= 1


def test_evaluation_after_the_last_step_only(simulated_model: Path, rows: Path) -> None:
    with Trainer.on(Simulator(), simulated_model, TrainConfig(steps=3)) as trainer:
        assert [report.evaluation is not None for report in trainer.fit(rows, eval_data=rows)] == [False, False, True]


def test_logprobs_stand_where_the_labels_are(trainer: Trainer) -> None:
    pack = random_pack(3, supervised=5)
    found = trainer.logprobs(pack)
    assert found.shape == pack.labels.shape
    assert np.isfinite(found).tolist() == (pack.labels != -100).tolist()
    assert (found[:5] < 0).all()


def test_seed_decides_the_start(simulated_model: Path) -> None:
    starts = []
    for seed in (1, 1, 2):
        with Trainer.on(Simulator(), simulated_model, TrainConfig(seed=seed)) as trainer:
            starts.append(np.concatenate([values.ravel() for values in trainer.parameters().values()]).tobytes())
    assert starts[0] == starts[1] != starts[2]


def test_parameters_are_copies_and_can_be_set(trainer: Trainer) -> None:
    parameters = trainer.parameters()
    assert list(parameters) == sorted(parameters)
    changed = {name: values + 1 for name, values in parameters.items()}
    trainer.set_parameters(changed)
    for name, values in trainer.parameters().items():
        assert np.array_equal(values, changed[name])
        assert not np.array_equal(values, parameters[name])


def test_parameters_that_do_not_fit_are_refused_together(trainer: Trainer) -> None:
    before = trainer.parameters()
    names = list(before)
    bad = {
        "lora.unknown": np.zeros(1, np.float32),
        names[0]: np.zeros((1, 1), np.float32),
        names[1]: np.full_like(before[names[1]], np.nan),
        names[2]: np.ones_like(before[names[2]]),
    }
    with pytest.raises(MismatchError) as caught:
        trainer.set_parameters(bad)
    assert [problem.where for problem in caught.value.problems] == ["lora.unknown", names[0], names[1]]
    assert np.array_equal(trainer.parameters()[names[2]], before[names[2]])


def test_rate_needs_a_length(simulated_model: Path) -> None:
    with Trainer.on(Simulator(), simulated_model, TrainConfig()) as trainer:
        with pytest.raises(UsageError, match="number of steps"):
            trainer.train_step([random_pack(1)])
        assert trainer.train_step([random_pack(1)], lr=0.5).lr == 0.5
    config = TrainConfig(schedule="constant", warmup=0, lr=0.25)
    with Trainer.on(Simulator(), simulated_model, config) as trainer:
        assert [trainer.train_step([random_pack(1)]).lr for _ in range(3)] == [0.25] * 3


def test_engine_stays_open_when_the_adapter_does_not_fit(simulated_model: Path, tmp_path: Path) -> None:
    simulator = Simulator()
    with pytest.raises(MismatchError):
        Trainer.on(simulator, simulated_model, init_adapter=tmp_path / "none")
    assert not simulator.closed
    Trainer.on(simulator, simulated_model).close()
    assert simulator.closed
