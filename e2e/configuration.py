"""Configure the programs of the cluster. Settings that are not obvious have a comment that says why."""

import json
from pathlib import Path
from typing import Any

import yaml

from e2e.programs import OWN, chosen_containerd, minor

SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
DOMAIN = "cluster.local"
PODS = "10.77.0.0/16"
POD_GROUP_FEATURE = "GenericWorkload"
POD_GROUPS_SINCE = 37
"""The minor version whose feature gate and API are those of groups of pods, as fenka reads them."""
ISSUER = f"https://kubernetes.default.svc.{DOMAIN}"
CONTAINERD = "/run/containerd/containerd.sock"
CERTIFICATES = "/etc/containerd/certs.d"
"""The nodes' folder of registries and of whom they trust for them."""
CRIO = "/run/crio/crio.sock"
PAUSE = "localhost/pause:e2e"
AUDITED = "audited"
"""The namespace whose ServiceAccounts' requests are in the API server's audit log."""
FRONT_PROXY = "front-proxy-client"
"""The name of the API server as a client of extension API servers, and the folder of that authority."""


def pod_group_gate() -> dict[str, bool]:
    """Return the feature gate of groups of pods, where this Kubernetes has their API."""
    return {POD_GROUP_FEATURE: True} if minor() >= POD_GROUPS_SINCE else {}


def feature_gates() -> list[str]:
    """Return the option of a program of the control plane that switches pod_group_gate() on."""
    return [f"--feature-gates={name}=true" for name in pod_group_gate()]


def containerd(cni: Path, runc: str, driver: str = "cgroupfs") -> str:
    """Return containerd's configuration in TOML. driver: of cgroups, systemd or cgroupfs."""
    text = containerd_2(cni, runc) if chosen_containerd() is OWN else containerd_1(cni, runc)
    by_systemd = json.dumps(driver == "systemd")
    return text.replace("SystemdCgroup = false", f"SystemdCgroup = {by_systemd}")


def containerd_1(cni: Path, runc: str) -> str:
    """Return the configuration of containerd 1.7. Its CDI is off unless it is switched on."""
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{CONTAINERD}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{CERTIFICATES}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false
"""


def containerd_2(cni: Path, runc: str) -> str:
    """Return the configuration of containerd 2."""
    return f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.nri.v1.nri",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{CONTAINERD}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE}"
  [plugins."io.containerd.cri.v1.images".registry]
    config_path = "{CERTIFICATES}"
[plugins."io.containerd.cri.v1.runtime"]
  # Root without CAP_SYS_RESOURCE may not lower an oom_score_adj, and runc's error does not name the cause.
  restrict_oom_score_adj = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{cni}"]
    conf_dir = "/etc/cni/net.d"
    use_internal_loopback = true
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false
"""


def crio(programs: Path, driver: str) -> str:
    """Return CRI-O's configuration in TOML. programs: the folder with pinns and the CNI plugins."""
    return f"""\
[crio]
root = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
storage_driver = "overlay"
[crio.api]
listen = "{CRIO}"
[crio.runtime]
cgroup_manager = "{driver}"
conmon_cgroup = "{"system.slice" if driver == "systemd" else "pod"}"
default_runtime = "runc"
pinns_path = "{programs}/pinns"
[crio.runtime.runtimes.runc]
runtime_path = "/usr/sbin/runc"
monitor_path = "/usr/bin/conmon"
[crio.image]
pause_image = "{PAUSE}"
signature_policy = "/etc/containers/policy.json"
[crio.network]
network_dir = "/etc/cni/net.d/"
plugin_dirs = ["{programs}"]
"""


def pod_network(subnet: str) -> str:
    """Return the CNI configuration of one node in JSON.

    Each pod has its own link to the node instead of a port of a bridge. So every packet between pods passes
    the node's netfilter. A Service whose pod is on the caller's node then works without br_netfilter.
    """
    return json.dumps(
        {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": subnet}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True},
            ],
        }
    )


def kubelet(pki: Path, node: str, driver: str = "cgroupfs", runtime: str = CONTAINERD) -> str:
    """Return the KubeletConfiguration of one node.

    driver: of cgroups, as the runtime's. runtime: its socket.
    """
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            # Kubernetes 1.30 has no such field.
            **({"failCgroupV1": False} if minor() > 30 else {}),
            "cgroupDriver": driver,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{runtime}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True, "cacheTTL": "2s"},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{pki}/kubelet-serving-{node}.crt",
            "tlsPrivateKeyFile": f"{pki}/kubelet-serving-{node}.key",
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": DOMAIN,
            "resolvConf": "",
            # All nodes share the disk of this machine, so a nearly full disk must not cause evictions.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
            },
            "featureGates": pod_group_gate(),
            "nodeStatusUpdateFrequency": "2s",
            "nodeStatusReportFrequency": "10s",
            "syncFrequency": "10s",
            "maxPods": 200,
            "serializeImagePulls": False,
        }
    )


def kube_proxy(kubeconfig: Path, node: str) -> str:
    """Return the KubeProxyConfiguration of one machine."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "mode": "iptables",
            "hostnameOverride": node,
            "clusterCIDR": PODS,
            # 0 leaves the limits of the connection table unchanged: they apply to the whole kernel.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
    )


def scheduler(kubeconfig: Path, text: str | None = None) -> str:
    """Return a user's KubeSchedulerConfiguration with the settings that this cluster needs."""
    written: dict[str, Any] = (yaml.safe_load(text) if text else None) or {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
    }
    connection = {"qps": 500, "burst": 1000} | written.get("clientConnection", {})
    written["clientConnection"] = connection | {"kubeconfig": str(kubeconfig)}
    written["leaderElection"] = {"leaderElect": False}
    return yaml.safe_dump(written)


def kube_scheduler(written: Path) -> list[str]:
    """Return the command line of kube-scheduler."""
    return [
        "kube-scheduler",
        f"--config={written}",
        *feature_gates(),
        "--v=2",
    ]


def etcd(data: Path) -> list[str]:
    """Return the command line of etcd."""
    return [
        "etcd",
        f"--data-dir={data}",
        # A crash of this machine may lose the cluster; a killed etcd does not.
        "--unsafe-no-fsync",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--log-level=warn",
    ]


def audit_policy() -> str:
    """Return the policy of the API server's audit log, which tests read to count a client's requests."""
    return yaml.safe_dump(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "Metadata", "userGroups": [f"system:serviceaccounts:{AUDITED}"]},
                {"level": "None"},
            ],
        }
    )


def apiserver(pki: Path, address: str, audit: Path, audit_log: Path) -> list[str]:
    """Return the command line of kube-apiserver. audit: the file of the policy."""
    return [
        "kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        "--secure-port=6443",
        "--bind-address=0.0.0.0",
        f"--advertise-address={address}",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={pki}/tokens.pub",
        f"--service-account-signing-key-file={pki}/tokens.key",
        f"--service-account-issuer={ISSUER}",
        f"--service-cluster-ip-range={SERVICES}",
        # The aggregation layer: API servers of extensions recognise this one by its client certificate.
        f"--requestheader-client-ca-file={pki}/{FRONT_PROXY}/ca.crt",
        f"--requestheader-allowed-names={FRONT_PROXY}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/{FRONT_PROXY}/{FRONT_PROXY}.crt",
        f"--proxy-client-key-file={pki}/{FRONT_PROXY}/{FRONT_PROXY}.key",
        f"--audit-policy-file={audit}",
        f"--audit-log-path={audit_log}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        *feature_gates(),
        *(["--runtime-config=scheduling.k8s.io/v1beta1=true"] if pod_group_gate() else []),
        "--allow-privileged=true",
    ]


def controller_manager(pki: Path) -> list[str]:
    """Return the command line of kube-controller-manager."""
    return [
        "kube-controller-manager",
        f"--kubeconfig={pki}/controller-manager.kubeconfig",
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={pki}/tokens.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        *feature_gates(),
        "--kube-api-qps=300",
        "--kube-api-burst=600",
        "--node-monitor-period=2s",
        # The default is 15 s.
        "--horizontal-pod-autoscaler-sync-period=2s",
    ]
