"""The tests of each file, and the number of its faults that are planted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    path: str
    tests: tuple[str, ...]
    count: int
    interpreted: bool  # a Triton kernel: its tests run under TRITON_INTERPRET=1


def _target(path: str, tests: str, count: int = 2, interpreted: bool = False) -> Target:
    """Make a target. tests: "ops/linear" for tests/ops/test_linear.py, "reference/" for a folder."""
    words = [word.rpartition("/") for word in tests.split()]
    files = tuple(f"tests/{folder}/test_{name}.py" if name else f"tests/{folder}" for folder, _, name in words)
    return Target(path, files, count, interpreted)


def _cpu(op: str, count: int, sources: str) -> list[Target]:
    return [_target(f"csrc/cpu/{source}", f"ops/{op} ops/cpu_{op}", count) for source in sources.split()]


OPS = "retro_kernels/ops"
CALLS = "ops/validation ops/repeated_calls ops/transforms"
TARGETS = (
    *_cpu("leaky_average", 3, "leaky_average.cpp"),
    *_cpu("topk_chunks", 2, "topk_scan.h topk_chunks.cpp topk_chunks_backward.cpp"),
    *_cpu("relative_attention", 2, "relative_attention_fwd.cpp relative_attention_bwd.cpp relative_attention_tile.h"),
    *_cpu("relative_attention", 2, "partition.h"),
    *_cpu("chunked_cross_attention", 2, "chunked_cross_attention_fwd.cpp chunked_cross_attention_bwd.cpp"),
    *[_target(f"csrc/cpu/{op}.cpp", f"ops/{op} ops/repeated_calls") for op in ("linear", "rms_norm", "cross_entropy")],
    _target("csrc/cpu/relative_logits.cpp", "ops/relative_logits", 3),
    _target("csrc/cpu/dropout.h", "ops/cpu_relative_attention ops/cpu_chunked_cross_attention"),
    _target("csrc/text/match.cpp", "model/text"),
    _target("csrc/text/minhash.cpp", "model/text"),
    _target("retro_kernels/core/arguments.py", "ops/validation ops/contract", 4),
    _target("retro_kernels/core/backends.py", "ops/validation ops/contract ops/fallback ops/linear", 3),
    _target("retro_kernels/core/operator.py", "ops/contract ops/transforms"),
    _target("retro_kernels/core/transforms.py", "ops/transforms", 3),
    _target("retro_kernels/core/native.py", "ops/size_one ops/cpu_infrastructure"),
    # it makes a key by `add`, one statement for each part
    _target("retro_kernels/core/eager.py", "ops/repeated_calls ops/plans ops/transforms ops/linear ops/contract", 40),
    _target("retro_kernels/core/plan.py", "ops/repeated_calls ops/plans", 3),
    _target("retro_kernels/core/steps.py", "ops/repeated_calls ops/plans aot/launcher", 6),
    *[
        _target(f"{OPS}/{op}/call.py", f"ops/{op} {CALLS}")
        for op in ("chunked_cross_attention", "leaky_average", "merge_attention")
        + ("relative_attention", "relative_logits", "topk_chunks")
    ],
    *[
        _target(f"{OPS}/{op}/{file}.py", f"ops/{op} ops/repeated_calls ops/transforms")
        for op in ("linear", "rms_norm", "cross_entropy")
        for file in ("call", "cpu")
    ],
    _target("retro_kernels/compile/configs.py", "aot/configs bench/tune ops/repeated_calls"),
    _target("retro_kernels/reference_lib/attention.py", "reference/", 3),
    _target(f"{OPS}/topk_chunks/reference.py", "reference/"),
    _target("retro_kernels/testing/errors.py", "reference/errors"),
    _target(f"{OPS}/leaky_average/triton/kernels.py", "ops/leaky_average", interpreted=True),
    _target(f"{OPS}/relative_logits/triton/kernels.py", "ops/relative_logits", interpreted=True),
    _target("retro_model/layers/attention.py", "model/layers model/retro model/cache model/sequence_parallel"),
    _target("retro_model/layers/positions.py", "model/layers model/retro"),
    _target("retro_model/generation/sampling.py", "model/generation model/generation_protocol", 3),
    _target("retro_model/data/store.py", "model/store model/hostile_folders", 3),
    _target("retro_model/data/neighbours.py", "model/neighbours model/hostile_folders"),
    _target("retro_model/data/database.py", "model/database model/neighbours"),
    _target("retro_model/data/dedup.py", "model/dedup"),
    _target("retro_model/evaluation/in_context.py", "model/decoder_scores"),
    _target("retro_model/evaluation/leaks.py", "model/evaluation model/commands"),
    _target("retro_model/evaluation/scoring.py", "model/evaluation"),
    _target("retro_model/evaluation/suffixes.py", "model/suffixes"),
    _target("retro_model/evaluation/knn_lm.py", "model/suffixes"),
    _target("retro_model/training/step.py", "model/training"),
    _target("retro_model/training/checkpoint_folder.py", "model/checkpoint model/sharded_checkpoint", 3),
    _target("retro_model/training/sharded_checkpoint.py", "model/sharded_checkpoint", 3),
    _target("retro_model/memory_mosaics/cache.py", "model/memory_mosaics/", 3),
    _target("retro_model/data/executors.py", "model/shards", 3),
    _target("retro_model/apps/serve/app.py", "model/serving/app model/serving/load", 4),
    _target("retro_model/apps/serve/desk.py", "model/serving/load", 6),
    _target("retro_model/apps/serve/patient.py", "model/serving/load", 6),
    _target("retro_model/training/batches.py", "model/training"),
    _target("retro_model/retro/retrieval.py", "model/retro model/cache"),
    _target("retro_model/retro/retrofitted_decoder.py", "model/retrofit model/retrofit_abroad"),
    _target("retro_model/retro/frozen_decoder.py", "model/retrofit model/own_attention"),
    _target("retro_model/retro/own_attention.py", "model/own_attention"),
    _target("retro_model/retro/own_pass.py", "model/own_attention"),
    _target("retro_model/integrations/huggingface.py", "model/huggingface model/retrofit_abroad"),
    _target("bench/check/numerics.py", "bench/work bench/run"),
    _target("bench/check/topk.py", "bench/work"),
    _target("bench/compare/gate_statistics.py", "bench/gate_statistics", 3),
    _target("bench/compare/record_files.py", "bench/reports"),
    _target("bench/records/machines.py", "bench/reports", 1),
    _target("bench/records/record.py", "bench/record bench/reports bench/killed", 3),
    _target("bench/static/sass.py", "bench/static_records", 3),
    _target("bench/static/regressions.py", "bench/static_records"),
    _target("bench/ops/leaky_average.py", "bench/work bench/commands", 1),
    _target("bench/ops/relative_attention.py", "bench/work bench/commands"),
)
