"""The chart's boards for Grafana: GPU APP for users of cards, and one for those who operate the cluster."""

from collections.abc import Callable, Mapping

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.monitoring.panels import Query, bars, board, lines, number, rows

_POD = '{namespace=~"$namespace", pod=~"$pod", node=~"$node"}'
_CARD = '{node=~"$node"}'
_CARD_NAME = "{{node}} card {{index}}"
_POD_NAME = "{{namespace}}/{{pod}}"


def _of_pods(metric: str, *, by: str = "sum") -> str:
    return f"{by} by (namespace, pod) (fenka_container_gpu_{metric}{_POD})"


def gpu_app() -> Dashboard:
    """Return the board of pods and cards: what they may use, use and wait for."""
    variables = (
        ("namespace", "fenka_container_gpu_memory_limit_bytes"),
        ("pod", 'fenka_container_gpu_memory_limit_bytes{namespace=~"$namespace"}'),
        ("node", "fenka_card_memory_total_bytes"),
    )
    used, allowed = _of_pods("memory_used_bytes"), _of_pods("memory_limit_bytes")
    throttled = f"rate(fenka_container_gpu_throttled_seconds_total{_POD}[$__rate_interval])"
    refused = f"increase(fenka_container_gpu_out_of_memory_total{_POD}[$__rate_interval])"
    panels = (
        lines(
            "GPU memory of pods",
            "bytes",
            Query(used, f"{_POD_NAME} used"),
            Query(allowed, f"{_POD_NAME} allowed", dashed=True),
            decimals=3,
        ),
        bars(
            "GPU memory of pods, used of allowed",
            "percentunit",
            Query(f"{used} / {allowed}", _POD_NAME),
        ),
        lines(
            "GPU utilisation of pods",
            "percentunit",
            Query(_of_pods("utilization_ratio", by="avg"), _POD_NAME),
            Query(_of_pods("compute_limit_ratio", by="avg"), f"{_POD_NAME} allowed", dashed=True),
            most=1,
            text="Share of the cards' time. Without a dashed line nothing limits it.",
        ),
        lines(
            "Throttled: threads of pods that wait for their share",
            "none",
            Query(f"sum by (namespace, pod) ({throttled})", _POD_NAME),
            text="1 is one thread that waits all the time because of its limit of compute.",
        ),
        lines(
            "Temperature of cards",
            "celsius",
            Query(f"fenka_card_temperature_celsius{_CARD}", _CARD_NAME),
        ),
        lines(
            "Power of cards",
            "watt",
            Query(f"fenka_card_power_watts{_CARD}", _CARD_NAME),
            Query(f"fenka_card_power_limit_watts{_CARD}", f"{_CARD_NAME} limit", dashed=True),
        ),
        lines(
            "GPU memory of cards, held and used",
            "bytes",
            Query(f"fenka_card_memory_used_bytes{_CARD}", f"{_CARD_NAME} used"),
            Query(f"fenka_card_memory_allocated_bytes{_CARD}", f"{_CARD_NAME} held"),
            Query(f"fenka_card_memory_total_bytes{_CARD}", f"{_CARD_NAME} total", dashed=True),
            text="Held is what slices on the card may use, whether or not they do.",
        ),
        lines(
            "Waiting pods",
            "none",
            Query("max(fenka_scheduler_waiting_pods)", "waiting"),
            Query("max(fenka_scheduler_waiting_oldest_seconds)", "age of the oldest", unit="s"),
        ),
        lines(
            "Refused GPU memory",
            "none",
            Query(f"sum by (namespace, pod) ({refused})", _POD_NAME),
            text="Requests that did not fit in the slice.",
        ),
    )
    text = "What pods may use of cards, and what they use of it."
    made = board("GPU APP", "fenka-gpu-app", text, variables)
    for panel in panels:
        made.with_panel(panel)
    return made


def operators() -> Dashboard:
    """Return the board of the cluster: whether cards are healthy and in use, and whether the queue moves."""
    held = "sum(fenka_card_memory_allocated_bytes) / sum(fenka_card_memory_total_bytes)"
    idle = f"time() - fenka_container_gpu_last_active_timestamp_seconds{_CARD}"
    waits = "sum by (le) (rate(fenka_scheduler_wait_seconds_bucket[$__rate_interval]))"
    answers = "sum by (le, verb) (rate(fenka_scheduler_request_seconds_bucket[$__rate_interval]))"
    panels = (
        number("Nodes", "none", Query("count(fenka_node_info)")),
        number("Cards", "none", Query("count(fenka_card_healthy)")),
        number(
            "Cards out of use",
            "none",
            Query("count(fenka_card_healthy == 0 or fenka_card_cordoned == 1) or vector(0)"),
        ),
        number("Memory held", "percentunit", Query(held)),
        number("Waiting pods", "none", Query("max(fenka_scheduler_waiting_pods)")),
        number(
            "Leaders",
            "none",
            Query("sum(fenka_scheduler_leading)"),
            text="Exactly one replica binds.",
        ),
        lines(
            "GPU memory of nodes, held and used",
            "bytes",
            Query(f"sum by (node) (fenka_card_memory_used_bytes{_CARD})", "{{node}} used"),
            Query(f"sum by (node) (fenka_card_memory_allocated_bytes{_CARD})", "{{node}} held"),
            Query(
                f"sum by (node) (fenka_card_memory_total_bytes{_CARD})",
                "{{node}} total",
                dashed=True,
            ),
        ),
        lines(
            "GPU utilisation of nodes",
            "percentunit",
            Query(f"avg by (node) (fenka_card_utilization_ratio{_CARD})", "{{node}}"),
            most=1,
        ),
        lines(
            "GPU memory of namespaces, held and used",
            "bytes",
            Query(
                "sum by (namespace) (fenka_container_gpu_memory_used_bytes)", "{{namespace}} used"
            ),
            Query(
                "sum by (namespace) (fenka_container_gpu_memory_limit_bytes)",
                "{{namespace}} held",
                dashed=True,
            ),
        ),
        rows(
            "Held and not computing for half an hour",
            "s",
            Query(f"sort_desc({idle} > 1800)"),
            text="Slices without card time since. Cards that do not measure it are missing.",
        ),
        lines(
            "Waiting pods by namespace",
            "none",
            Query("max by (namespace) (fenka_scheduler_namespace_waiting_pods)", "{{namespace}}"),
            stacked=True,
        ),
        lines(
            "Waiting pods by reason",
            "none",
            Query("max by (reason) (fenka_scheduler_waiting_reasons) > 0", "{{reason}}"),
            stacked=True,
            text="Of the first 50, by the reason that most cards have.",
        ),
        lines(
            "Time that pods have waited",
            "s",
            Query(f"histogram_quantile(0.5, {waits})", "half of them less than"),
            Query(f"histogram_quantile(0.95, {waits})", "95 % of them less than"),
        ),
        lines(
            "Bindings",
            "none",
            Query(
                "sum by (outcome) (increase(fenka_scheduler_binds_total[$__rate_interval]))",
                "{{outcome}}",
            ),
        ),
        lines(
            "Time of the scheduler's answers, 99 % of them",
            "s",
            Query(f"histogram_quantile(0.99, {answers})", "{{verb}}"),
        ),
        lines(
            "Violations of limits",
            "none",
            Query(
                "sum by (kind) (increase(fenka_node_violations_total[$__rate_interval]))",
                "{{kind}}",
            ),
        ),
        lines(
            "Hottest cards",
            "celsius",
            Query(f"topk(10, fenka_card_temperature_celsius{_CARD})", _CARD_NAME),
        ),
        rows(
            "XIDs of the last day",
            "none",
            Query(
                f"sum by (node, index, model, kind) (increase(fenka_card_xid_errors_total{_CARD}[1d])) > 0"
            ),
        ),
        rows(
            "Versions",
            "none",
            Query("count by (version, driver_version, cuda_version) (fenka_node_info)"),
        ),
    )
    text = "Whether cards are healthy and in use, and whether the queue moves."
    made = board(
        "GPU operators", "fenka-gpu-operators", text, (("node", "fenka_card_memory_total_bytes"),)
    )
    for panel in panels:
        made.with_panel(panel)
    return made


BOARDS: Mapping[str, Callable[[], Dashboard]] = {"gpu-app": gpu_app, "gpu-operators": operators}
"""The boards by the names of their files."""
