"""Two manifests of one job: what both of them know."""

from __future__ import annotations

import itertools

from neffcache.errors import Mismatch
from neffcache.remote.packs import places, with_places
from neffcache.store.ranks import fold_ranks, ranges
from neffcache.store.records import Artifact, Manifest, RankClass, manifest


def united(theirs: Manifest, ours: Manifest) -> Manifest:
    """`theirs` when it has all that `ours` has, or `ours` the other way round, else a new manifest with both's graphs.

    A complete manifest is never replaced by what an incomplete one knows. Raises Mismatch for two different jobs.
    """
    if theirs.id == ours.id:
        return theirs
    names = theirs.components.keys() | ours.components.keys()
    if any(_sha256(theirs, name) != _sha256(ours, name) for name in names):
        raise Mismatch(
            f"job key {ours.cache_key} stands for two jobs",
            hint="compare them with neffcache key --diff",
            details={"manifests": [theirs.id, ours.id]},
        )
    if theirs.complete != ours.complete:
        return theirs if theirs.complete else ours
    both = _both(theirs, ours)
    return next((item for item in (theirs, ours) if item.id == both.id), both)


def _sha256(item: Manifest, name: str) -> object:
    return item.components.get(name, {}).get("sha256")


def _both(theirs: Manifest, ours: Manifest) -> Manifest:
    phases = tuple(dict.fromkeys((*theirs.phases, *ours.phases)))
    artifacts: dict[tuple[str, str], Artifact] = {(item.store, item.path): item for item in theirs.artifacts}
    for item in ours.artifacts:
        artifacts.setdefault((item.store, item.path), item)
    made = manifest(
        cache_key=theirs.cache_key,
        components=theirs.components,
        request=theirs.request,
        complete=theirs.complete,
        phases=phases if set(theirs.phases) != set(ours.phases) else theirs.phases,
        rank_classes=_classes(theirs, ours),
        artifacts=artifacts.values(),
        environment=theirs.environment,
        versions=theirs.versions,
        created=max(theirs.created, ours.created),
        host=theirs.host,
        extra={**ours.extra, **theirs.extra},
    )
    return with_places(made, {**places(ours), **places(theirs)})


def _classes(theirs: Manifest, ours: Manifest) -> list[RankClass]:
    """Classes of ranks that have the same graphs on both sides, each with the graphs of both."""
    sides = [[(number, pair) for number, item in enumerate(side.rank_classes) for pair in ranges(item.ranks)]
             for side in (theirs, ours)]  # fmt: skip
    edges = sorted({edge for side in sides for _, (low, high) in side for edge in (low, high + 1)})
    groups: dict[tuple[int | None, int | None], list[int]] = {}
    for low, after in itertools.pairwise(edges):
        pair = tuple(next((n for n, (first, last) in side if first <= low <= last), None) for side in sides)
        if pair != (None, None):
            groups.setdefault((pair[0], pair[1]), []).extend(range(low, after))
    found = []
    for (left, right), ranks in groups.items():
        parts = [side.rank_classes[number] for side, number in ((theirs, left), (ours, right)) if number is not None]
        graphs: dict[str, tuple[str, ...]] = {}
        for part in parts:
            for phase, keys in part.graphs.items():
                # A phase that both know in their own order keeps the first one's.
                graphs[phase] = tuple(dict.fromkeys((*graphs.get(phase, ()), *keys)))
        extra = {name: value for part in reversed(parts) for name, value in part.extra.items()}
        found.append(RankClass(fold_ranks(ranks), graphs, extra))
    return found
