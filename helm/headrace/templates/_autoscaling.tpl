{{/* Whether the chart itself sets a pool's replicas; takes a dict of root and values. */}}
{{- define "headrace.keepsReplicas" -}}
{{- $type := .values.autoscaling.type -}}
{{- if or (eq $type "none") (and (eq $type "controller") .root.Values.poolController.dryRun) }}true{{ end -}}
{{- end }}

{{/* The pools that the controller scales, as YAML under `pools`. */}}
{{- define "headrace.controlledPools" -}}
{{- $pools := list -}}
{{- range (include "headrace.pools" . | fromYaml).pools -}}
{{- if eq .autoscaling.type "controller" -}}
{{- $pools = append $pools . -}}
{{- end -}}
{{- end -}}
{{- dict "pools" $pools | toYaml -}}
{{- end }}

{{/* The object that sets a component's replicas; takes a dict of root, component, name, kind, values, pool. */}}
{{- define "headrace.autoscaler" -}}
{{- $scaling := .values.autoscaling -}}
{{- if eq $scaling.type "hpa" }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
{{ include "headrace.metadata" . }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: {{ .kind }}
    name: {{ .name }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  metrics:
    {{- toYaml $scaling.metrics | nindent 4 }}
  {{- with $scaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- else if eq $scaling.type "keda" }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
{{ include "headrace.metadata" . }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: {{ .kind }}
    name: {{ .name }}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  pollingInterval: {{ $scaling.pollingInterval }}
  cooldownPeriod: {{ $scaling.cooldownPeriod }}
  triggers:
    {{- toYaml $scaling.triggers | nindent 4 }}
{{- end }}
{{- end }}
