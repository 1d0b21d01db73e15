{{/* Ports within the pods; each pod has an address of its own. */}}
{{- define "headway.ports" -}}
http: 8100
{{- if .Values.keys.existingSecret }}
control: 8101
{{- if or .Values.engine.checkpoint .Values.engine.emulate }}
telemetry: 8102
{{- end }}
{{- end }}
{{- end -}}

{{/* The deployment without its instances: what an engine is started from, besides its own lines. */}}
{{- define "headway.sharedOptions" -}}
{{- $model := required "model: a Hugging Face id, or a folder below /models" .Values.model -}}
{{- $read := pick .Values "model" "servedModelName" "engine" "routing" "promptCheckpoint" "order" "migration" -}}
{{- $read = list $read .Values.prefill.arguments .Values.decode.arguments .Values.proxy.options .Values.coordinator.options -}}
{{- if regexMatch `[\x7f-\x9f\x{2028}\x{2029}\x{fffe}\x{ffff}]|(^|[^\\])(\\\\)*\\u202[89]` (toJson $read) -}}
{{- fail "model, servedModelName, engine, arguments and options: one has a control character or a line separator (U+007F to U+009F, U+2028, U+2029), which YAML reads as the end of a line or not at all; remove it" -}}
{{- end -}}
{{- if and .Values.migration (not .Values.keys.existingSecret) -}}
{{- fail "migration: requests are moved through the engines' control sockets, which require keys: name a Secret as keys.existingSecret" -}}
{{- end -}}
{{- if and .Values.engine.batching (gt (int .Values.prefill.replicas) 0) -}}
{{- fail "engine.batching: requires engines that both prefill and decode: set prefill.replicas to 0" -}}
{{- end -}}
{{- if (.Values.engine.emulate | default dict).barrier -}}
{{- fail "engine.emulate.barrier: of engines on one machine, not of pods: leave it out" -}}
{{- end -}}
{{- $options := dict "model" $model "served_model_name" .Values.servedModelName "engine" .Values.engine -}}
{{- if .Values.keys.existingSecret -}}
{{- $_ := set $options "keys" "/etc/headway-keys" -}}
{{- end -}}
{{- toYaml $options -}}
{{- end -}}

{{/* Several proxies need one that decides for all of them; with one there is nothing. */}}
{{- define "headway.coordinator" -}}
{{- if gt (int .Values.proxy.replicas) 1 -}}
{{- if not .Values.keys.existingSecret -}}
{{- fail "proxy.replicas: more than one proxy requires keys, as the coordinator's sockets do: name a Secret as keys.existingSecret" -}}
{{- end -}}
{{- $set := printf "%s-coordinator" (include "headway.name" .) -}}
{{- $host := printf "%s-0.%s.%s.svc.%s" $set $set .Release.Namespace .Values.clusterDomain -}}
{{- merge (dict "endpoint" (printf "tcp://%s:5700" $host) "host" "::" "port" 8002) .Values.coordinator.options | toYaml -}}
{{- end -}}
{{- end -}}

{{/* Further flags of a role's engines, as JSON. */}}
{{- define "headway.arguments" -}}
{{- if gt (int .gpus) 1 -}}
{{- concat (list "--tensor-parallel-size" (toString (int .gpus))) .arguments | toJson -}}
{{- else -}}
{{- toJson .arguments -}}
{{- end -}}
{{- end -}}

{{/* The file that `headway launch` and `headway serve` read. An instance is called like its pod. */}}
{{- define "headway.deploymentFile" -}}
{{- $file := include "headway.sharedOptions" . | fromYaml -}}
{{- $ports := include "headway.ports" . | fromYaml -}}
{{- $instances := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- $set := printf "%s-%s" (include "headway.name" $) $role -}}
{{- $values := index $.Values $role -}}
{{- range $i := until (int $values.replicas) -}}
{{- $pod := printf "%s-%d" $set $i -}}
{{- $host := printf "%s.%s.%s.svc.%s" $pod $set $.Release.Namespace $.Values.clusterDomain -}}
{{- $instance := dict "name" $pod "role" $role "url" (printf "http://%s:%d" $host (int $ports.http)) -}}
{{- range $kind := list "control" "telemetry" -}}
{{- if hasKey $ports $kind -}}
{{- $_ := set $instance $kind (printf "tcp://%s:%d" $host (int (index $ports $kind))) -}}
{{- end -}}
{{- end -}}
{{- $arguments := include "headway.arguments" $values | fromJsonArray -}}
{{- if $arguments -}}
{{- $_ := set $instance "arguments" $arguments -}}
{{- end -}}
{{- $instances = append $instances $instance -}}
{{- end -}}
{{- end -}}
{{- $_ := set $file "instances" $instances -}}
{{- if .Values.routing -}}
{{- $_ := set $file "routing" .Values.routing -}}
{{- end -}}
{{- if .Values.promptCheckpoint -}}
{{- $_ := set $file "prompt_checkpoint" .Values.promptCheckpoint -}}
{{- end -}}
{{- if .Values.order -}}
{{- $_ := set $file "order" .Values.order -}}
{{- end -}}
{{- if .Values.migration -}}
{{- $_ := set $file "migration" .Values.migration -}}
{{- end -}}
{{- with include "headway.coordinator" . -}}
{{- $_ := set $file "coordinator" (fromYaml .) -}}
{{- end -}}
{{- $_ := set $file "proxy" (merge (dict "host" "::" "port" 8000) .Values.proxy.options) -}}
{{- toYaml $file -}}
{{- end -}}
