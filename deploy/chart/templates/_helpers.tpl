{{- define "fenka.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 48 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- end }}

{{/* Of everything. */}}
{{- define "fenka.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* Of one component's pods: (list . "scheduler"). They never change, selectors are immutable. */}}
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

{{/* What the extender is called: (dict "root" . "url" URL). Also docs/kubernetes.md shows it. */}}
{{- define "fenka.extender" -}}
{{- $file := .root.Files.Get "files/scheduler-config.yaml" | fromYaml -}}
{{- $extender := first $file.extenders -}}
{{- list (set $extender "urlPrefix" .url) | toYaml -}}
{{- end }}
