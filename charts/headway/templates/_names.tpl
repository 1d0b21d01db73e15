{{/*
What objects are called: a DNS label, as Services must be, which begins with a letter and has no dots.
Pods of a StatefulSet add up to 8 + 3 characters, of 63 in a host name.
*/}}
{{- define "headway.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- $name = .Release.Name -}}
{{- else -}}
{{- $name = printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- $name = replace "." "-" $name -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- $name = printf "h-%s" $name -}}
{{- end -}}
{{- $name | trunc 40 | trimAll "-" -}}
{{- end -}}

{{/* What selects the pods of a component; Kubernetes forbids to change it later. */}}
{{- define "headway.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "headway.labels" -}}
{{ include "headway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* The image that all pods run. */}}
{{- define "headway.image" -}}
{{- $repository := required "image.repository: there is no published image; docs/kubernetes.md says what yours has to contain" .Values.image.repository -}}
{{- if contains "@" $repository -}}
{{- quote $repository -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) | quote -}}
{{- end -}}
{{- end -}}
