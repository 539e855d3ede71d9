{{- define "fenka.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 48 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- end }}

{{/* Labels of all objects. */}}
{{- define "fenka.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* Labels of one component's pods: (list . "scheduler"). They never change, since selectors are immutable. */}}
{{- define "fenka.selector" -}}
app.kubernetes.io/name: fenka
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "fenka.imageReference" -}}
{{- $tagged := printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- with .Values.image.digest }}{{ printf "%s@%s" $tagged . }}{{ else }}{{ $tagged }}{{ end }}
{{- end }}

{{- define "fenka.image" -}}
image: {{ include "fenka.imageReference" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* The option of a program that sends spans. */}}
{{- define "fenka.traces" -}}
{{- with (.Values.tracing | default dict).endpoint }}
- --traces={{ . }}
{{- end }}
{{- end }}

{{/* The port of the dashboard's pod at which usage is read. */}}
{{- define "fenka.usagePort" -}}
8251
{{- end }}

{{- define "fenka.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{/* The option of a program's log level: (list . VALUES), with the defaults for values of an older release. */}}
{{- define "fenka.logLevel" -}}
{{- $level := (index . 1).logLevel | default (index . 0).Values.logLevel | default "info" -}}
{{- if ne $level "info" -}}
- --log-level={{ $level }}
{{- end -}}
{{- end }}

{{/* "true" or "". It is "" for values of a release without TLS, which stays unchanged. */}}
{{- define "fenka.tls" -}}
{{- if (.Values.scheduler.tls | default dict).enabled }}true{{ end }}
{{- end }}

{{/* The read port, with its default for values of an older release. */}}
{{- define "fenka.readPort" -}}
{{- (.Values.scheduler.read | default dict).port | default 12346 }}
{{- end }}

{{/* The version of the API MutatingAdmissionPolicy to use, or "". `helm template` asks no server for its kinds, so the
version of Kubernetes (--kube-version) counts there. */}}
{{- define "fenka.mutatingApi" -}}
{{- $group := "admissionregistration.k8s.io" -}}
{{- $known := .Capabilities.APIVersions -}}
{{- $chosen := .Values.admission.mutatingApi | default "auto" -}}
{{- if ne $chosen "auto" -}}
{{- if ne $chosen "none" }}{{ $group }}/{{ $chosen }}{{ end -}}
{{- else if $known.Has (printf "%s/v1/MutatingAdmissionPolicy" $group) -}}{{ $group }}/v1
{{- else if $known.Has (printf "%s/v1beta1/MutatingAdmissionPolicy" $group) -}}{{ $group }}/v1beta1
{{- else if and (not ($known.Has "v1/Pod")) (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) -}}{{ $group }}/v1
{{- end -}}
{{- end }}

{{/* The resources of slices, as a JSON list. Pods with whole cards or instances alone may also use nodes that fenka does
not serve. */}}
{{- define "fenka.sliceResources" -}}
{{- $extender := first (.Files.Get "files/scheduler-config.yaml" | fromYaml).extenders -}}
{{- $resources := list -}}
{{- range $extender.managedResources }}
{{- if and (ne .name "nvidia.com/gpu") (not (hasPrefix "nvidia.com/mig-" .name)) (or (not .ignoredByScheduler) $.Values.hamiNames) }}
{{- $resources = append $resources .name }}
{{- end }}
{{- end }}
{{- toJson $resources }}
{{- end }}

{{/* "true" if pods get the second scheduler's name from a policy. "" for values of an older release. */}}
{{- define "fenka.assignsScheduler" -}}
{{- $second := .Values.secondScheduler -}}
{{- if and $second.enabled (($second.assign | default dict).enabled) (include "fenka.mutatingApi" .) }}true{{ end }}
{{- end }}

{{/* The extender's entry for kube-scheduler: (dict "root" . "host" HOST:PORT "files" DIRECTORY). docs/reference/kube-scheduler.md
also shows it. files: the folder of kube-scheduler's certificate; empty: as in files/scheduler-config.yaml. */}}
{{- define "fenka.extender" -}}
{{- $file := .root.Files.Get "files/scheduler-config.yaml" | fromYaml -}}
{{- $extender := first $file.extenders -}}
{{- if include "fenka.tls" .root -}}
{{- $_ := set $extender "urlPrefix" (printf "https://%s/gpushare-scheduler" .host) -}}
{{- if .files -}}
{{- range $name, $path := $extender.tlsConfig -}}
{{- $_ := set $extender.tlsConfig $name (printf "%s/%s" $.files (base $path)) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $_ := set $extender "urlPrefix" (printf "http://%s/gpushare-scheduler" .host) -}}
{{- $_ := set $extender "enableHTTPS" false -}}
{{- $_ := unset $extender "tlsConfig" -}}
{{- end -}}
{{- list $extender | toYaml -}}
{{- end }}

{{/* kube-scheduler's certificate, with the file names of `fenka certificates --into`. */}}
{{- define "fenka.clientFiles" -}}
secretName: {{ include "fenka.fullname" . }}-scheduler-client
defaultMode: 0440
items:
  - {key: ca.crt, path: ca.crt}
  - {key: tls.crt, path: client.crt}
  - {key: tls.key, path: client.key}
{{- end }}

{{/* A node selector that keeps pods off nodes of other operating systems, for which there is no image. */}}
{{- define "fenka.linux" -}}
{{- mergeOverwrite (dict "kubernetes.io/os" "linux") (deepCopy (. | default dict)) | toYaml -}}
{{- end }}

{{/* The same for pods of fenka's own image, which may be for one processor only: (list . SELECTOR). */}}
{{- define "fenka.nodes" -}}
{{- $architecture := (index . 0).Values.image.architecture -}}
{{- $known := ternary (dict "kubernetes.io/arch" $architecture) dict (not (empty $architecture)) -}}
{{- include "fenka.linux" (mergeOverwrite $known (deepCopy (index . 1 | default dict))) -}}
{{- end }}

{{/* "true" if ValidatingAdmissionPolicies are made. `helm template` does not query a server for its APIs, so the version also
counts. */}}
{{- define "fenka.validates" -}}
{{- $has := .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" -}}
{{- if and .Values.admission.enabled (or $has (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version)) }}true{{ end }}
{{- end }}

{{/* The annotations that record a pod's card, of all dialects, as a JSON list. A name that ends in "-" is one for each container;
fenka serves at most 128 containers of a pod. */}}
{{- define "fenka.recordNames" -}}
{{- $records := list
      "ALIYUN_COM_GPU_MEM_IDX" "ALIYUN_COM_GPU_MEM_POD" "ALIYUN_COM_GPU_MEM_DEV"
      "ALIYUN_COM_GPU_MEM_ASSUME_TIME" "ALIYUN_COM_GPU_MEM_ASSIGNED"
      "scheduler.framework.gpushare.allocation" "gpushare.alibabacloud.com/core-percentage"
      "tencent.com/predicate-gpu-idx-" "tencent.com/predicate-time" "tencent.com/predicate-node"
      "tencent.com/gpu-assigned"
      "fenka.io/cards" "fenka.io/chosen-by" "fenka.io/whole-cards" "fenka.io/instance" "fenka.io/resized" "fenka.io/resize-refused" "fenka.io/resize-final" -}}
{{- if .Values.hamiNames -}}
{{- $records = concat $records (list
      "hami.io/vgpu-devices-allocated" "hami.io/vgpu-devices-to-allocate" "hami.io/vgpu-node" "hami.io/vgpu-time") -}}
{{- end -}}
{{- $names := list -}}
{{- range $record := $records -}}
{{- if hasSuffix "-" $record -}}
{{- range $number := until 128 }}{{ $names = append $names (printf "%s%d" $record $number) }}{{ end -}}
{{- else -}}
{{- $names = append $names $record -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end }}

{{/* An affinity that keeps a program with a powerful token off nodes that share cards, as far as there are others, and its
replicas apart: (list . "scheduler"). A program that escapes from a slice finds no such token on its node then. The labels count
before the node program runs there, its pods where a label is not set. */}}
{{- define "fenka.affinity" -}}
nodeAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      preference:
        matchExpressions:
          {{- range include "fenka.sharingLabels" . | fromJsonArray }}
          - {key: {{ . }}, operator: DoesNotExist}
          {{- end }}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
            component: gpushare-device-plugin
    - weight: 50
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "fenka.selector" . | nindent 12 }}
{{- end }}

{{/* The labels of nodes that share cards, as a JSON list. */}}
{{- define "fenka.sharingLabels" -}}
{{- list "gpushare" "cgpu" "nvidia-device-enable" "ack.node.gpu.schedule" "fenka.io/mig" | toJson -}}
{{- end }}

{{/* The names of the schedulers that call fenka, as a JSON list. The default is for values of an older release. */}}
{{- define "fenka.schedulerNames" -}}
{{- $names := (.Values.scheduler.order | default dict).schedulerNames | default (list "default-scheduler") -}}
{{- if .Values.secondScheduler.enabled }}{{ $names = append $names .Values.secondScheduler.schedulerName }}{{ end -}}
{{- toJson $names -}}
{{- end }}
