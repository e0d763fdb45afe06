"""Digest of the data order: independent of ranks, workers, lengths and resumes."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from gpt2.config import Config
from gpt2.data.dataset import open_dataset
from gpt2.data.loader import BatchLoader
from gpt2.data.sampler import TrainSampler, order_digest_from_manifest
from gpt2.training.state import DataOrder, TrainingSession
from lib.env.process_group import ProcessGroup
from lib.env.ranks import current_process

# More steps than are gathered at once.
STEPS = 70


@pytest.fixture
def digest_of(configure: Callable[..., Config], build_dir: Path) -> Callable[[int], str]:
    """Return the final digest after ``STEPS`` steps of four sequences."""
    config = configure()
    sampler = TrainSampler(open_dataset(config.data, build_dir).train, 16, seed=3)

    def digest(rank: int) -> str:
        with ProcessGroup.join(current_process()) as group:
            order = DataOrder(group)
            loader = BatchLoader(
                sampler, config.data, 4, 1, rank, group.size, 0, False, order.offered
            )
            for _ in islice(loader, STEPS):
                order.consumed()
            return order.state_dict()

    return digest


def order_digest(seed: int, tokens: int, block: int, batch: int, steps: int) -> str:
    manifest = {
        "seeds": {"seed": seed},
        "batch": {"global_sequences": batch, "tokens_per_iteration": batch * block},
        "data": {"splits": {"train": {"tokens": tokens}}},
    }
    return order_digest_from_manifest(manifest, steps)


def take(session: TrainingSession, steps: int) -> None:
    """Consume batches like training."""
    for _ in islice(session.batches(), steps):
        session.order.consumed()


def test_ranks_agree_on_what_one_process_would_consume(configure, build_dir, digest_of, ranks):
    n_tokens = open_dataset(configure().data, build_dir).train.n_tokens
    expected = order_digest(3, n_tokens, 16, 4, STEPS)
    assert digest_of(0) == expected
    for size in (2, 4):
        assert ranks(size, digest_of) == [expected] * size


def test_length_and_workers_do_not_move_the_first_steps(session):
    digests = []
    for planned, workers in ((20, 0), (100, 0), (100, 2)):
        opened = session(MAX_ITERS=planned, LOADER_WORKERS=workers)
        take(opened, 20)
        digests.append(opened.order.state_dict())
    tokens = opened.dataset.train.n_tokens
    assert digests == [order_digest(opened.config.seed, tokens, 16, 4, 20)] * 3


def test_a_batch_that_is_offered_again_counts_once(session):
    """A step that ran out of memory is offered again."""
    opened = session()
    take(opened, 3)
    opened.iteration = 3
    next(opened.batches())
    take(opened, 2)
    tokens = opened.dataset.train.n_tokens
    assert opened.order.state_dict() == order_digest(opened.config.seed, tokens, 16, 4, 5)


def test_an_interrupted_run_records_the_digest_of_its_manifest(configure, train):
    train(configure(WARMUP_ITERATIONS=2), stop_at=5)
    done = train(configure(WARMUP_ITERATIONS=2))
    recorded = done.summary()["final"]["data_order_digest"]
    assert recorded == order_digest_from_manifest(done.manifest(), 12)
