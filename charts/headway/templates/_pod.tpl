{{/*
What the pods of engines and proxy have in common. Takes the chart's scope as `root`, and as `side`
and `other` whose secret key the pod has and whose public one: engine and watcher, or the reverse.
*/}}

{{- define "headway.podSettings" -}}
{{- $values := .root.Values -}}
automountServiceAccountToken: false
# Else a Service called `vllm` would set VLLM_PORT, which vLLM reads.
enableServiceLinks: false
{{- with $values.serviceAccountName }}
serviceAccountName: {{ quote . }}
{{- end }}
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- end -}}

{{- define "headway.environment" -}}
{{- $values := .root.Values -}}
- {name: HOME, value: /home/headway}
- {name: USER, value: headway}  # PyTorch asks for a name, and the user has none in the image
- {name: HF_HOME, value: /models/huggingface}
{{- with $values.apiKey.existingSecret }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ quote . }}, key: {{ quote $values.apiKey.key }}}
{{- end }}
{{- with $values.huggingFaceToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ quote . }}, key: {{ quote $values.huggingFaceToken.key }}}
{{- end }}
{{- end -}}

{{- define "headway.mounts" -}}
- {name: deployment, mountPath: /etc/headway, readOnly: true}
{{- if .root.Values.keys.existingSecret }}
- {name: keys, mountPath: /etc/headway-keys, readOnly: true}
{{- end }}
- {name: models, mountPath: /models}
- {name: home, mountPath: /home/headway}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "headway.volumes" -}}
{{- $values := .root.Values -}}
- name: deployment
  configMap:
    name: {{ include "headway.name" .root | quote }}
{{- with $values.keys.existingSecret }}
- name: keys
  secret:
    secretName: {{ quote . }}
    defaultMode: 0440
    items:  # the secret key of this side only
      - {key: {{ $.side }}.key_secret, path: {{ $.side }}.key_secret}
      - {key: {{ $.other }}.key, path: {{ $.other }}.key}
{{- end }}
- name: models
  {{- if $values.modelCache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ quote $values.modelCache.existingClaim }}
  {{- else if $values.modelCache.sizeLimit }}
  emptyDir:
    sizeLimit: {{ $values.modelCache.sizeLimit }}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- end -}}

{{- define "headway.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
{{- end -}}
