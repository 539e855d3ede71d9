"""What the programs of the cluster are told. Every setting that is not obvious says why it is there."""

import json
from pathlib import Path
from typing import Any

import yaml

SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
PODS = "10.77.0.0/16"
POD_GROUP_FEATURE = "GenericWorkload"
"""The gate behind which Kubernetes 1.37 has groups of pods that are scheduled together."""
ISSUER = "https://kubernetes.default.svc.cluster.local"
CONTAINERD = "/run/containerd/containerd.sock"
PAUSE = "localhost/pause:e2e"


def containerd(cni: Path, runc: str) -> str:
    """containerd's configuration, in TOML."""
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
[plugins."io.containerd.cri.v1.runtime"]
  # Root without CAP_SYS_RESOURCE may not lower an oom_score_adj, and runc fails obscurely when told to.
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


def pod_network(subnet: str) -> str:
    """The CNI plugins of one node, in JSON.

    Each pod has a link of its own to the node, no bridge: then every packet between pods passes the node's
    netfilter, and a service whose pod is on the caller's node works without a kernel module for bridges.
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


def kubelet(pki: Path, node: str) -> str:
    """KubeletConfiguration of one node."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True, "cacheTTL": "2s"},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{pki}/kubelet-serving-{node}.crt",
            "tlsPrivateKeyFile": f"{pki}/kubelet-serving-{node}.key",
            # Nothing answers there; without an address every pod gets a warning event.
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            # The disk is the whole machine's: that it is nearly full is none of the node's business.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
            },
            "featureGates": {POD_GROUP_FEATURE: True},
            "nodeStatusUpdateFrequency": "2s",
            "nodeStatusReportFrequency": "10s",
            "syncFrequency": "10s",
            "maxPods": 200,
            "serializeImagePulls": False,
        }
    )


def kube_proxy(kubeconfig: Path, node: str) -> str:
    """KubeProxyConfiguration of one machine."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "mode": "iptables",
            "hostnameOverride": node,
            "clusterCIDR": PODS,
            # Zeros: the connection table's limits belong to the whole kernel, leave them alone.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
    )


def scheduler(kubeconfig: Path, text: str | None = None) -> str:
    """A KubeSchedulerConfiguration as a user would write it, with what this cluster must add."""
    written: dict[str, Any] = (yaml.safe_load(text) if text else None) or {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
    }
    connection = {"qps": 500, "burst": 1000} | written.get("clientConnection", {})
    written["clientConnection"] = connection | {"kubeconfig": str(kubeconfig)}
    written["leaderElection"] = {"leaderElect": False}
    return yaml.safe_dump(written)


def kube_scheduler(written: Path) -> list[str]:
    """kube-scheduler's command line."""
    return [
        "kube-scheduler",
        f"--config={written}",
        f"--feature-gates={POD_GROUP_FEATURE}=true",
        "--v=2",
    ]


def etcd(data: Path) -> list[str]:
    """etcd's command line."""
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


def apiserver(pki: Path, address: str) -> list[str]:
    """kube-apiserver's command line."""
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
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--feature-gates={POD_GROUP_FEATURE}=true",
        "--runtime-config=scheduling.k8s.io/v1beta1=true",
        "--allow-privileged=true",
    ]


def controller_manager(pki: Path) -> list[str]:
    """kube-controller-manager's command line."""
    return [
        "kube-controller-manager",
        f"--kubeconfig={pki}/controller-manager.kubeconfig",
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={pki}/tokens.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        f"--feature-gates={POD_GROUP_FEATURE}=true",
        "--kube-api-qps=300",
        "--kube-api-burst=600",
        "--node-monitor-period=2s",
    ]
