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

{{- define "fenka.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "fenka.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{/* "true" or "". It is "" for values of a release without TLS, which stays unchanged. */}}
{{- define "fenka.tls" -}}
{{- if (.Values.scheduler.tls | default dict).enabled }}true{{ end }}
{{- end }}

{{/* The read port, with its default for values of an older release. */}}
{{- define "fenka.readPort" -}}
{{- (.Values.scheduler.read | default dict).port | default 12346 }}
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
