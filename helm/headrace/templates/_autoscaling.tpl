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
