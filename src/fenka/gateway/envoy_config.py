"""Envoy's configuration for a service: its listeners and filters, and the replicas as endpoints. Pure.

Each port of the replicas has two listeners for clients, which differ only in how connections reach them, and
one for requests that wait. The replicas of a port are one cluster. A version is a locality of it. Envoy
selects localities in proportion to their weights, exactly, because one worker serves all. Within a locality
it selects the replica with the fewest requests.

The cluster's second priority is the listener for requests that wait, so a request goes there as soon as no
replica accepts it. A filter of that listener holds the request until the gateway's own program says that a
replica is ready. Then the request goes to the same cluster again.

Field names are those of Envoy's API, https://www.envoyproxy.io/docs/envoy/latest/api-v3/api.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fenka.jobs.routing_table import ReplicaEntry, RoutingTable
from fenka.server.pod_spans import collector

Config = dict[str, Any]

ADMIN_SOCKET, HELD_SOCKET = "admin", "held"
"""Unix sockets in Envoy's working directory: its own administration, and what decides about held requests."""
HOLD_CLUSTER = "hold"
VERSION_METADATA = "fenka", "version"
CLIENTS, WAITING = "clients", "waiting"
"""Names of the listeners in statistics."""
ACTIVE_REQUESTS = rf"http\.{CLIENTS}\.downstream_rq_active"
STATISTICS = "|".join(
    (
        r"^fenka\.",
        rf"^http\.{CLIENTS}\.downstream_cx_active$",
        r"^cluster\..*\.(upstream_rq_retry|upstream_cx_connect_fail)$",
    )
)
"""A pattern of the statistics that metrics are made of."""
REPLICA_PRIORITY = 0

REFUSED = 429
"""How a held request is refused: Envoy takes 5xx for a failure to decide. Clients get 503."""

BACKLOG = 4096
"""Connections that the kernel accepts for a program that is busy: its own default limit (net.core.somaxconn).
A connection to a Unix socket with a full queue fails at once, and its request with it.
"""
MISDIRECTED = 421
"""For a host name that is not the service's: RFC 9110, section 15.5.20."""

CONNECT_TIMEOUT_S = 5.0
"""For a connection; after that another replica is selected."""
IDLE_S = 1.5
"""For which an idle connection to a replica is used again. Common servers keep one for longer (gunicorn 2 s,
uvicorn 5 s). A request that meets the end of its connection may be lost.
"""
CHECK_S, RECHECK_S, CHECK_TIMEOUT_S = 1.0, 0.1, 2.0
"""Between attempts to connect to a replica, after one that succeeded and one that failed; for an attempt."""
REPLICAS_TRIED = 3
"""Replicas that refuse a connection until the request waits."""
HEAD_S = 10.0
"""For the head of a request."""
HEAD_KIB, HEAD_FIELDS = 64, 200
BUFFER_BYTES = 64 << 10
"""Of a connection, for what has not been passed on yet. A request that waits has at most twice this."""
_FAIRNESS = {
    # Requests of a connection that are read at once, until other connections have their turn.
    "http.max_requests_per_io_cycle": 1,
    # A connection ends when half of this many requests or more were reset within a second each.
    "overload.premature_reset_total_stream_count": 100,
}
STREAMS = 128
"""Requests of an HTTP/2 connection at a time."""
CONNECTION_WINDOW_BYTES = STREAMS * BUFFER_BYTES
"""Of HTTP/2: requests that wait, or that nobody reads, do not hold up others on their connection."""
MANY = 1 << 20
"""A limit that the number of connections or of waiting requests reaches before."""
EXACT = 100_000
"""Overprovisioning in percent: one accepting replica of many gets the whole share of its version."""
DURATION_BOUNDS_MS = (
    5,
    10,
    25,
    50,
    100,
    250,
    500,
    1000,
    2500,
    5000,
    10_000,
    30_000,
    60_000,
    300_000,
)
FAILURES = ("UF", "UC", "UR", "LR", "UPE")
"""Response flags of requests that a replica has failed: https://www.envoyproxy.io/docs/envoy/latest/
configuration/observability/access_log/usage
"""
MAX_STATISTICS = 10_000
"""Rows of versions and statuses: a replica may answer with any status."""
TRACE_CLUSTER, TRACE_TIMEOUT_S = "traces", 5.0
SYSTEM_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SAFE_METHODS = "GET|HEAD|OPTIONS|PUT|DELETE"
"""Requests that may be sent a second time."""


class EnvoySettings(msgspec.Struct, frozen=True):
    """The limits of Envoy, by a gateway's options.

    Attributes:
        wait_s: Seconds that a request waits for a replica.
        response_s: Seconds from the end of a request to the head of its response, without the wait.
        connections: Clients' connections at a time.
        memory_bytes: Envoy's heap at most: near it requests are refused and large ones end.
        traces: URL of an OpenTelemetry collector; empty: nothing is traced.
        service: The name under which it shows the requests; empty for the gateway's.
        hosts: The host names that clients may use, `*.NAME` for all below NAME; empty: they may use any.
    """

    wait_s: float
    response_s: float
    connections: int
    memory_bytes: int
    traces: str = ""
    service: str = ""
    hosts: tuple[str, ...] = ()


def bootstrap(addresses: Mapping[str, tuple[str, int]], settings: EnvoySettings) -> Config:
    """Return Envoy's configuration but for the replicas.

    Args:
        addresses: Where clients connect, by the name of the replicas' port.
        settings: The limits.
    """
    listeners, clusters = list[Config](), list[Config]()
    for index, (port, (host, number)) in enumerate(addresses.items()):
        place = {"socket_address": {"address": host, "port_value": number}}
        listeners += [
            _listener(f"{port}", place, _clients(port, settings), inbound=True),
            _listener(
                f"{port}-relayed",
                _pipe(relay_socket(index)),
                _clients(port, settings),
                relayed=True,
            ),
            _listener(f"{port}-waiting", _pipe(_waiting_socket(index)), _waiting(port, settings)),
        ]
        clusters.append(_replica_cluster(port, index))
    if settings.traces:
        clusters.append(_trace_cluster(settings.traces))
    return {
        "node": {"id": "gateway", "cluster": "fenka"},
        "admin": {"address": _pipe(ADMIN_SOCKET)},
        # How old the durations may be that metrics show.
        "stats_flush_interval": "1s",
        "stats_config": {
            "histogram_bucket_settings": [
                {"match": {"contains": "duration"}, "buckets": [*DURATION_BOUNDS_MS]}
            ]
        },
        "static_resources": {"listeners": listeners, "clusters": [*clusters, _hold_cluster()]},
        "overload_manager": _overload(settings),
        "layered_runtime": {"layers": [{"name": "static", "static_layer": _FAIRNESS}]},
    }


def endpoint_file(index: int) -> str:
    """Return the name of the file with the endpoints of a port's cluster."""
    return f"endpoints-{index}.json"


def relay_socket(index: int) -> str:
    """Return the name of Envoy's Unix socket for connections that our socket has accepted."""
    return f"relayed-{index}"


def endpoints(table: RoutingTable | None, port: str, index: int, version: str) -> Config:
    """Return the endpoints of a port's cluster.

    Args:
        table: The replicas; None if they are not known yet.
        port: The name of the port.
        index: Its number.
        version: The version of this set of endpoints, which Envoy reports once they are in use.
    """
    localities = list[Config]()
    for entry in table.versions if table else ():
        hosts = [
            _endpoint(
                replica, port, entry.name, accepts=bool(entry.weight) and not replica.terminating
            )
            for replica in entry.replicas
            if port in replica.ports
        ]
        if hosts:
            # A locality needs a weight; without one that accepts requests it gets none.
            localities.append(_locality(entry.name, hosts, max(entry.weight, 1), REPLICA_PRIORITY))
    unchecked = {"disable_active_health_check": True}
    address = _pipe(_waiting_socket(index))
    waiting = {"endpoint": {"address": address, "health_check_config": unchecked}}
    # Priorities are numbered without a gap.
    priority = REPLICA_PRIORITY + 1 if localities else REPLICA_PRIORITY
    localities.append(_locality("", [waiting], 1, priority))
    resource = {
        "@type": _type("config.endpoint.v3.ClusterLoadAssignment"),
        "cluster_name": port,
        "endpoints": localities,
        "policy": {"overprovisioning_factor": EXACT},
    }
    return {"version_info": version, "resources": [resource]}


def endpoint_address(replica: ReplicaEntry, port: str) -> str:
    """Return the text of a replica's address: see `address_text`."""
    return address_text(_place(replica, port))


def address_text(address: Config) -> str:
    """Return one text for an address of Envoy's API, by which replicas are found in what Envoy reports."""
    if "pipe" in address:
        path: str = address["pipe"]["path"]
        return path
    place = address["socket_address"]
    name, number = place["address"], place["port_value"]
    return f"[{name}]:{number}" if ":" in name else f"{name}:{number}"


def _place(replica: ReplicaEntry, port: str) -> Config:
    address = replica.ports[port]
    if isinstance(address, str):
        return _pipe(address)
    return {"socket_address": {"address": replica.host, "port_value": address}}


def _endpoint(replica: ReplicaEntry, port: str, version: str, *, accepts: bool) -> Config:
    namespace, key = VERSION_METADATA
    return {
        "endpoint": {"address": _place(replica, port)},
        "health_status": "HEALTHY" if accepts else "DRAINING",
        "metadata": {"filter_metadata": {namespace: {key: version}}},
    }


def _locality(name: str, hosts: Sequence[Config], weight: int, priority: int) -> Config:
    return {
        "locality": {"zone": name},
        "load_balancing_weight": weight,
        "priority": priority,
        "lb_endpoints": hosts,
    }


# --- listeners ------------------------------------------------------------------------------------------


def _listener(
    name: str, address: Config, manager: Config, *, inbound: bool = False, relayed: bool = False
) -> Config:
    """Return a listener.

    Args:
        name: Its name.
        address: Where it listens.
        manager: What it does with connections.
        inbound: It is closed first when the gateway ends.
        relayed: Its connections begin with a line that has the client's address.
    """
    proxied = {"name": "envoy.filters.listener.proxy_protocol"} | _typed(
        "extensions.filters.listener.proxy_protocol.v3.ProxyProtocol"
    )
    network_filter = {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": manager,
    }
    return {
        "name": name,
        "address": address,
        "filter_chains": [{"filters": [network_filter]}],
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "listener_filters": [proxied] if relayed else [],
        # The kernel accepts connections while Envoy is busy.
        "tcp_backlog_size": BACKLOG,
    } | ({"traffic_direction": "INBOUND"} if inbound else {})


def _clients(port: str, settings: EnvoySettings) -> Config:
    """Return how clients' connections are served."""
    response_s = settings.wait_s + settings.response_s
    return (
        _manager(CLIENTS, port, response_s, [], settings.hosts)
        | _tracing(settings)
        | {
            "use_remote_address": True,
            # By itself Envoy appends an address of the machine in place of a loopback address.
            "skip_xff_append": True,
        }
    )


def _waiting(port: str, settings: EnvoySettings) -> Config:
    """Return how requests are served that wait for a replica."""
    hold = {
        "http_service": {
            "server_uri": {
                "uri": f"http://{HOLD_CLUSTER}/",
                "cluster": HOLD_CLUSTER,
                # The program answers in time by itself.
                "timeout": _seconds(settings.wait_s + 30),
            },
            "path_prefix": f"/{port}",
            "authorization_response": {
                "allowed_client_headers": {"patterns": [{"exact": "content-type"}]}
            },
        },
        "status_on_error": {"code": 503},
    }
    held = {"name": "envoy.filters.http.ext_authz"} | _typed(
        "extensions.filters.http.ext_authz.v3.ExtAuthz", **hold
    )
    # Addresses that precede the client's stay as the first listener has made them.
    own = {
        "use_remote_address": False,
        "skip_xff_append": True,
    }
    return _manager(WAITING, port, settings.response_s, [held]) | own | _tracing(settings)


def _tracing(settings: EnvoySettings) -> Config:
    """Return how requests are traced: by the W3C's headers, which replicas get, too."""
    if not settings.traces:
        return {}
    service = {
        "http_uri": {
            "uri": f"{settings.traces.rstrip('/')}/v1/traces",
            "cluster": TRACE_CLUSTER,
            "timeout": _seconds(TRACE_TIMEOUT_S),
        }
    }
    provider = {"name": "envoy.tracers.opentelemetry"} | _typed(
        "config.trace.v3.OpenTelemetryConfig",
        http_service=service,
        service_name=f"fenka-gateway/{settings.service}" if settings.service else "fenka-gateway",
    )
    # Clients' requests have no IDs of Envoy's, which would decide otherwise.
    sampled = {"pack_trace_reason": False, "use_request_id_for_trace_sampling": False}
    return {
        "tracing": {"provider": provider},
        "request_id_extension": _typed(
            "extensions.request_id.uuid.v3.UuidRequestIdConfig", **sampled
        ),
    }


def _manager(
    name: str, port: str, response_s: float, filters: Sequence[Config], hosts: Sequence[str] = ()
) -> Config:
    router = {"name": "envoy.filters.http.router"} | _typed(
        "extensions.filters.http.router.v3.Router", suppress_envoy_headers=True
    )
    return {
        "@type": _type(
            "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
        ),
        "stat_prefix": name,
        "codec_type": "AUTO",
        "generate_request_id": False,
        "server_header_transformation": "PASS_THROUGH",
        "request_headers_timeout": _seconds(HEAD_S),
        "stream_idle_timeout": _seconds(response_s),
        "max_request_headers_kb": HEAD_KIB,
        "common_http_protocol_options": {
            "max_headers_count": HEAD_FIELDS,
            "idle_timeout": _seconds(3600),
        },
        "http_protocol_options": {
            "accept_http_10": True,
            "default_host_for_http_10": "localhost",
            "enable_trailers": True,
        },
        "http2_protocol_options": _http2(),
        "proxy_100_continue": True,
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "route_config": _hosts(_routes(port, response_s, waiting=name == WAITING), hosts),
        "http_filters": [*filters, router],
        "local_reply_config": {"mappers": _statuses()},
        "access_log": _counters(name),
    }


def _hosts(routes: Config, names: Sequence[str]) -> Config:
    """Return which requests get routes: those for these host names, with any port; for none of them all.

    A web page of any name can lead a browser to a loopback address (DNS rebinding), and then reads what the
    service answers. The browser still sends the page's name.
    """
    if not names:
        return {"virtual_hosts": [routes]}
    sentence = f"this service answers to {', '.join(names)}, not to this host name\n"
    refusal = {"status": MISDIRECTED, "body": {"inline_string": sentence}}
    others = {
        "name": "others",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "direct_response": refusal}],
    }
    return {
        "virtual_hosts": [routes | {"domains": [*names]}, others],
        "ignore_port_in_host_matching": True,
    }


def _routes(port: str, response_s: float, *, waiting: bool) -> Config:
    websocket = [{"name": "upgrade", "string_match": {"exact": "websocket", "ignore_case": True}}]
    post = [{"name": ":method", "string_match": {"exact": "POST"}}]
    safe = [{"name": ":method", "string_match": {"safe_regex": {"regex": SAFE_METHODS}}}]
    return {
        "name": port,
        "domains": ["*"],
        "request_headers_to_add": [] if waiting else [_client_address()],
        # For replicas only what clients and other proxies have sent.
        "request_headers_to_remove": ["x-envoy-internal", "x-envoy-external-address"],
        "routes": [
            _route(port, response_s, websocket, "", idle_s=0),
            # Most requests, for which the pattern below need not be matched.
            _route(port, response_s, post, ""),
            # One that has waited is sent once: it may be what ends replicas, and their end makes it wait.
            _route(port, response_s, safe, "" if waiting else ",reset"),
            _route(port, response_s, [], ""),
        ],
    }


def _statuses() -> list[Config]:
    """Return the statuses of Envoy's own replies: to held requests, and in place of replicas that failed."""
    refused = {"op": "EQ", "value": {"default_value": REFUSED, "runtime_key": "fenka.refused"}}
    return [
        {"filter": {"status_code_filter": {"comparison": refused}}, "status_code": 503},
        {"filter": {"response_flag_filter": {"flags": [*FAILURES]}}, "status_code": 502},
    ]


def _http2() -> Config:
    return {
        "max_concurrent_streams": STREAMS,
        "initial_stream_window_size": BUFFER_BYTES,
        "initial_connection_window_size": CONNECTION_WINDOW_BYTES,
    }


def _client_address() -> Config:
    header = {"key": "x-forwarded-for", "value": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"}
    return {"header": header, "append_action": "APPEND_IF_EXISTS_OR_ADD"}


def _route(
    port: str, response_s: float, headers: list[Config], retry_on: str, idle_s: float | None = None
) -> Config:
    """Return a route. idle_s: how long no byte may pass, 0 for any time; None for the listener's time."""
    retries = {
        "retry_on": f"connect-failure,refused-stream,reset-before-request{retry_on}",
        # The last one is for the listener of requests that wait.
        "num_retries": REPLICAS_TRIED + 1,
        "per_try_timeout": _seconds(response_s),
        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
        "host_selection_retry_max_attempts": 5,
        "retry_host_predicate": [
            {"name": "envoy.retry_host_predicates.previous_hosts"}
            | _typed("extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate")
        ],
        "retry_priority": {"name": "envoy.retry_priorities.previous_priorities"}
        | _typed(
            "extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
            update_frequency=REPLICAS_TRIED,
        ),
    }
    action = {"cluster": port, "timeout": "0s", "retry_policy": retries}
    if idle_s is not None:
        action["idle_timeout"] = _seconds(idle_s)
    return {"match": {"prefix": "/", "headers": headers}, "route": action}


def _counters(name: str) -> list[Config]:
    """Return what counts responses by version and status, and how other requests ended."""
    namespace, key = VERSION_METADATA
    version = {"name": "version", "value_format": f"%UPSTREAM_METADATA({namespace}:{key})%"}
    status = {"name": "status", "value_format": "%RESPONSE_CODE%"}
    flags = {"name": "flags", "value_format": "%RESPONSE_FLAGS%"}
    duration = {
        "stat": {"name": "duration", "tags": [version]},
        "unit": "Milliseconds",
        "value_format": "%DURATION%",
    }
    return [
        _access_log([_counter("responses", version, status)], [duration]),
        _access_log([_counter(f"{name}_ends", flags)], [])
        | {"filter": {"response_flag_filter": {}}},
    ]


def _access_log(counters: Sequence[Config], histograms: Sequence[Config]) -> Config:
    bounds = dict.fromkeys(("max_counters", "max_gauges", "max_histograms"), MAX_STATISTICS)
    return {"name": "envoy.access_loggers.stats"} | _typed(
        "extensions.access_loggers.stats.v3.Config",
        stats_scope={"prefix": "fenka"} | bounds,
        counters=counters,
        histograms=histograms,
    )


def _counter(name: str, *tags: Config) -> Config:
    return {"stat": {"name": name, "tags": tags}, "value_fixed": 1}


# --- clusters -------------------------------------------------------------------------------------------


def _replica_cluster(port: str, index: int) -> Config:
    least_request = {"name": "envoy.load_balancing_policies.least_request"} | _typed(
        "extensions.load_balancing_policies.least_request.v3.LeastRequest",
        selection_method="FULL_SCAN",
        locality_lb_config={"locality_weighted_lb_config": {}},
    )
    protocol = _typed(
        "extensions.upstreams.http.v3.HttpProtocolOptions",
        common_http_protocol_options={"idle_timeout": _seconds(IDLE_S)},
        use_downstream_protocol_config={
            "http_protocol_options": {"enable_trailers": True},
            "http2_protocol_options": _http2(),
        },
    )["typed_config"]
    file = {"path": endpoint_file(index), "watched_directory": {"path": "."}}
    return {
        "name": port,
        "type": "EDS",
        "connect_timeout": _seconds(CONNECT_TIMEOUT_S),
        "eds_cluster_config": {
            "eds_config": {"resource_api_version": "V3", "path_config_source": file}
        },
        "load_balancing_policy": {"policies": [{"typed_extension_config": least_request}]},
        "common_lb_config": {
            "healthy_panic_threshold": {"value": 0},
            # By default changes of health and weights may be a second late, after Envoy has reported them.
            "update_merge_window": "0s",
        },
        "circuit_breakers": {"thresholds": [_unbounded()]},
        "health_checks": [_health_check()],
        "ignore_health_on_host_removal": True,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol
        },
    }


def _health_check() -> Config:
    """Return how Envoy finds out which replicas accept connections.

    It does not judge by the ends of requests: clients can bring these about, and would exclude others.
    """
    return {
        "timeout": _seconds(CHECK_TIMEOUT_S),
        "interval": _seconds(CHECK_S),
        "no_traffic_interval": _seconds(CHECK_S),
        "unhealthy_interval": _seconds(RECHECK_S),
        "unhealthy_edge_interval": _seconds(RECHECK_S),
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "tcp_health_check": {},
    }


def _trace_cluster(url: str) -> Config:
    """Return where spans go. Raises InvalidTraces."""
    scheme, host, port = collector(url)
    endpoint = {"address": {"socket_address": {"address": host, "port_value": port}}}
    cluster = {
        "name": TRACE_CLUSTER,
        "type": "STRICT_DNS",
        "connect_timeout": _seconds(CONNECT_TIMEOUT_S),
        "load_assignment": {
            "cluster_name": TRACE_CLUSTER,
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
    }
    if scheme == "https":
        trusted = {"trusted_ca": {"filename": SYSTEM_CERTIFICATES}}
        cluster["transport_socket"] = {"name": "envoy.transport_sockets.tls"} | _typed(
            "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            sni=host,
            common_tls_context={"validation_context": trusted},
        )
    return cluster


def _hold_cluster() -> Config:
    hosts = [{"endpoint": {"address": _pipe(HELD_SOCKET)}}]
    return {
        "name": HOLD_CLUSTER,
        "type": "STATIC",
        "connect_timeout": _seconds(CONNECT_TIMEOUT_S),
        "circuit_breakers": {"thresholds": [_unbounded()]},
        "load_assignment": {"cluster_name": HOLD_CLUSTER, "endpoints": [{"lb_endpoints": hosts}]},
    }


def _unbounded() -> Config:
    names = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return dict.fromkeys(names, MANY)


def _overload(settings: EnvoySettings) -> Config:
    heap, connections = "envoy.resource_monitors.fixed_heap", _DOWNSTREAM
    return {
        "refresh_interval": "0.1s",
        "resource_monitors": [
            {"name": heap}
            | _typed(
                "extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                max_heap_size_bytes=settings.memory_bytes,
            ),
            {"name": connections}
            | _typed(
                "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                max_active_downstream_connections=settings.connections,
            ),
        ],
        "actions": [
            _action("envoy.overload_actions.shrink_heap", _at(heap, 0.8)),
            _action("envoy.overload_actions.disable_http_keepalive", _at(heap, 0.85)),
            _action("envoy.overload_actions.reset_high_memory_stream", _between(heap, 0.85, 0.95)),
            _action("envoy.overload_actions.stop_accepting_requests", _at(heap, 0.95)),
            _action("envoy.overload_actions.stop_accepting_connections", _at(heap, 0.97)),
            _action("envoy.overload_actions.reduce_timeouts", _between(heap, 0.8, 0.95))
            | _typed(
                "config.overload.v3.ScaleTimersOverloadActionConfig", timer_scale_factors=_TIMERS
            ),
        ],
        # Streams with less do not count as large.
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 17},
    }


_DOWNSTREAM = "envoy.resource_monitors.global_downstream_max_connections"
# Not those of requests: a model that computes long would lose its oldest ones.
_TIMERS = [
    {"timer": "HTTP_DOWNSTREAM_CONNECTION_IDLE", "min_timeout": "1s"},
]


def _action(name: str, trigger: Config) -> Config:
    return {"name": name, "triggers": [trigger]}


def _at(monitor: str, share: float) -> Config:
    return {"name": monitor, "threshold": {"value": share}}


def _between(monitor: str, start: float, full: float) -> Config:
    return {"name": monitor, "scaled": {"scaling_threshold": start, "saturation_threshold": full}}


# --- parts ----------------------------------------------------------------------------------------------


def _waiting_socket(index: int) -> str:
    return f"waiting-{index}"


def _pipe(path: str) -> Config:
    return {"pipe": {"path": path, "mode": 0o600}}


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.{name}"


def _typed(name: str, **fields: Any) -> Config:
    return {"typed_config": {"@type": _type(name), **fields}}


def _seconds(number: float) -> str:
    return f"{number:.3f}s"


def accepting(cluster_statuses: Iterable[Config]) -> dict[str, list[Config]]:
    """Return the addresses of replicas that get requests, by port, as Envoy's administration reports them."""
    return {
        cluster["name"]: [
            host["address"]
            for host in cluster.get("host_statuses", ())
            if host.get("priority", 0) == REPLICA_PRIORITY
            and host.get("locality", {}).get("zone")
            and _is_healthy(host.get("health_status", {}))
        ]
        for cluster in cluster_statuses
    }


def _is_healthy(health: Config) -> bool:
    """Return whether a host gets requests, by its health as Envoy reports it."""
    return health.get("eds_health_status") == "HEALTHY" and not health.get(
        "failed_active_health_check"
    )
